"""What the tokens of a record are, and which of them the loss counts.

======================  =====================================================  ==========================
task                    tokens                                                 counted by the loss
======================  =====================================================  ==========================
``sft``                 begin, prompt, response, end                           response and end
``sft`` with messages   the tokenizer's chat template over all messages        what the assistant says
``pt``                  begin, text, end                                       all but begin
======================  =====================================================  ==========================

Begin and end are left out where the tokenizer has none. Prompt and response are tokenised one by one, so that the
boundary between them is one between tokens, as it is in generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError

__all__ = ["TASKS", "Example", "Task", "TextTokenizer", "examples_of"]

TASKS = ("sft", "pt")
#: Where the text of a ``pt`` record is looked for. That of a text file is called ``content``.
_TEXT_FIELDS = ("text", "content")
TooLong = Literal["keep", "truncate", "drop", "split"]


class TextTokenizer(Protocol):
    """What is needed of a tokenizer."""

    begin: int | None
    end: int | None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, without special ones."""
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], bool]]:
        """The tokens of a conversation in pieces; of each, whether the assistant says it."""
        ...


@dataclass(frozen=True)
class Task:
    """How records become examples.

    Args:
        kind: ``sft`` or ``pt``.
        prompt, response: fields of an ``sft`` record; ``prompt`` may name several, which are joined by line ends.
        messages: the field with a list of ``{"role": ..., "content": ...}``, instead of the two.
        text: field of a ``pt`` record; None: ``text``, or else ``content``, whichever it has.
        max_length: most tokens of an example; None: any number.
        too_long: what happens to a longer one: ``keep``, ``truncate``, ``drop``, or (``pt``) ``split`` into several.

    Raises:
        UsageError: settings that do not go together.
    """

    kind: str = "sft"
    prompt: tuple[str, ...] = ("prompt",)
    response: str = "response"
    messages: str | None = None
    text: str | None = None
    max_length: int | None = None
    too_long: TooLong = "truncate"

    def __post_init__(self) -> None:
        if self.kind not in TASKS:
            raise UsageError(f"the task is {self.kind!r}", fix=f"give one of {', '.join(TASKS)}")
        if self.max_length is not None and self.max_length < 2:
            raise UsageError(f"max_length is {self.max_length}", fix="give at least 2")
        if self.too_long not in ("keep", "truncate", "drop", "split"):
            raise UsageError(f"too_long is {self.too_long!r}", fix="give keep, truncate, drop or split")
        if self.too_long == "split" and self.kind != "pt":
            raise UsageError("an example with a prompt cannot be split", fix="use truncate or drop with sft")

    @property
    def masked(self) -> bool:
        """Whether examples say which of their tokens the loss counts."""
        return self.kind == "sft"


class Example(NamedTuple):
    """Tokens (int32 ``[n]``), and 1 for each that the loss counts (uint8 ``[n]``; None: all but a begin)."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8] | None


class Outcome(NamedTuple):
    """What became of a record: its examples, or the problem; and whether it was too long."""

    examples: list[Example]
    problem: str = ""
    too_long: bool = False


def examples_of(records: Sequence[Mapping[str, Any]], task: Task, tokenizer: TextTokenizer) -> list[Outcome]:
    """The examples of some records. One that does not have what the task needs does not keep the others from theirs."""
    texts: list[str] = []
    plans: list[Any] = []
    for record in records:
        try:
            wanted = _texts(record, task)
        except ValueError as error:
            plans.append(str(error))
            continue
        if task.messages is None:
            plans.append(slice(len(texts), len(texts) + len(wanted)))
            texts += wanted
        else:
            plans.append(wanted)
    encoded = tokenizer.encode(texts) if texts else []
    outcomes = []
    for plan in plans:
        if isinstance(plan, str):
            outcomes.append(Outcome([], plan))
            continue
        try:
            pieces = _pieces(encoded[plan] if task.messages is None else plan, task, tokenizer)
        except ValueError as error:
            outcomes.append(Outcome([], str(error)))
            continue
        outcomes.append(_cut(pieces, task))
    return outcomes


def _texts(record: Mapping[str, Any], task: Task) -> Any:
    """The texts to be tokenised, or the messages."""
    if task.messages is not None:
        messages = _field(record, task.messages)
        good = isinstance(messages, list) and all(
            isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
        )
        if not good or not messages:
            raise ValueError(f"field {task.messages!r} is not a list of messages with a role each")
        return messages
    if task.kind == "pt":
        return [_text(record, *(_TEXT_FIELDS if task.text is None else (task.text,)))]
    return ["\n".join(text for name in task.prompt if (text := _text(record, name))), _text(record, task.response)]


def _field(record: Mapping[str, Any], *names: str) -> Any:
    """The value of the first field of these that there is."""
    for name in names:
        if name in record:
            return record[name]
    raise ValueError(f"no field {' or '.join(map(repr, names))}; there are: {', '.join(map(str, record))}")


def _text(record: Mapping[str, Any], *names: str) -> str:
    value = _field(record, *names)
    if not isinstance(value, str):
        name = next(name for name in names if name in record)
        raise ValueError(f"field {name!r} is not a text but a {type(value).__name__}")
    return value


def _pieces(found: Any, task: Task, tokenizer: TextTokenizer) -> list[tuple[list[int], bool]]:
    """Tokens, and whether the loss counts them."""
    if task.messages is not None:
        return tokenizer.chat(found)
    begin = [([tokenizer.begin], False)] if tokenizer.begin is not None else []
    end = [([tokenizer.end], True)] if tokenizer.end is not None else []
    if task.kind == "pt":
        return [*begin, (found[0], True), *end]
    return [*begin, (found[0], False), (found[1], True), *end]


def _cut(pieces: list[tuple[list[int], bool]], task: Task) -> Outcome:
    tokens = np.array([token for piece, _ in pieces for token in piece], dtype=np.int32)
    mask = np.repeat(np.array([counted for _, counted in pieces], dtype=np.uint8), [len(piece) for piece, _ in pieces])
    if not mask.any():
        return Outcome([], "nothing in it that the loss would count")
    most = task.max_length
    if most is None or len(tokens) <= most or task.too_long == "keep":
        return Outcome([_example(tokens, mask, task)])
    if task.too_long == "drop":
        return Outcome([], too_long=True)
    if task.too_long == "split":
        starts = range(0, len(tokens), most)
        parts = [_example(tokens[at : at + most], mask[at : at + most], task) for at in starts]
        return Outcome(parts, too_long=True)
    if not mask[:most].any():
        return Outcome([], f"the prompt alone has more than {most} tokens", too_long=True)
    return Outcome([_example(tokens[:most], mask[:most], task)], too_long=True)


def _example(tokens: NDArray[np.int32], mask: NDArray[np.uint8], task: Task) -> Example:
    return Example(tokens, mask if task.masked else None)
