"""Tokens of a record, and the ones that the loss counts.

======================  =====================================================  ==========================
task                    tokens                                                 counted by the loss
======================  =====================================================  ==========================
``sft``                 begin, prompt, response, end                           response and end
``sft`` with messages   the tokenizer's chat template over all messages        the assistant's words
``pt``                  begin, text, end                                       all but begin
======================  =====================================================  ==========================

Begin and end are left out if the tokenizer has none. Prompt and response are tokenised separately, so that the boundary
between them is a token boundary, as in generation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError
from energon_lite.trainer.tokenizing.tokenizer import HuggingFaceTokenizer

TASKS = ("sft", "pt")
#: Fields that are searched for the text of a ``pt`` record. That of a text file is called ``content``.
_TEXT_FIELDS = ("text", "content")
TooLong = Literal["keep", "truncate", "drop", "split"]
TOO_LONG: tuple[TooLong, ...] = get_args(TooLong)


@dataclass(frozen=True)
class Task:
    """Rule that turns records into examples.

    Args:
        kind: ``sft`` or ``pt``.
        prompt, response: fields of an ``sft`` record; ``prompt`` may name several, which are joined by line ends.
        messages: the field with a list of ``{"role": ..., "content": ...}``, instead of the two.
        text: field of a ``pt`` record; None: ``text``, or else ``content``, whichever it has.
        max_length: the most tokens of an example; None: no limit.
        too_long: treatment of longer ones: ``keep``, ``truncate``, ``drop``, or (``pt``) ``split`` into several.

    Raises:
        UsageError: the settings are incompatible.
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
        if self.too_long not in TOO_LONG:
            raise UsageError(f"too_long is {self.too_long!r}", fix="give keep, truncate, drop or split")
        if self.too_long == "split" and self.kind != "pt":
            raise UsageError("an example with a prompt cannot be split", fix="use truncate or drop with sft")


class Example(NamedTuple):
    """Tokens (int32 ``[n]``), and mask (uint8 ``[n]``), 1 for each token in the loss; None: all except begin."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8] | None


class Outcome(NamedTuple):
    """Result of a record: its examples, or the problem; and whether it was too long."""

    examples: list[Example]
    problem: str = ""
    too_long: bool = False


def examples_of(
    records: Sequence[Mapping[str, Any] | str], task: Task, tokenizer: HuggingFaceTokenizer
) -> list[Outcome]:
    """Make the examples of some records. A broken record does not affect the others.

    Args:
        records: the fields of each record, or the reason why there are none.
        task: task that makes examples.
        tokenizer: the tokenizer.
    """
    wanted: list[list[Any] | str] = []
    for record in records:
        try:
            wanted.append(record if isinstance(record, str) else _texts(record, task))
        except ValueError as error:
            wanted.append(str(error))
    # One call for all texts takes a fraction of the time of many calls.
    texts = [] if task.messages is not None else [text for item in wanted if not isinstance(item, str) for text in item]
    encoded = iter(tokenizer.encode_texts(texts))
    return [_outcome(item, encoded, task, tokenizer) for item in wanted]


def _texts(record: Mapping[str, Any], task: Task) -> list[Any]:
    """Return the texts to tokenise, or the messages."""
    if task.messages is not None:
        _, messages = _field(record, task.messages)
        good = isinstance(messages, list) and all(
            isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
        )
        if not good or not messages:
            raise ValueError(f"field {task.messages!r} is not a list of messages with a role each")
        return messages
    if task.kind == "pt":
        return [_text(record, *(_TEXT_FIELDS if task.text is None else (task.text,)))]
    return ["\n".join(text for name in task.prompt if (text := _text(record, name))), _text(record, task.response)]


def _field(record: Mapping[str, Any], *names: str) -> tuple[str, Any]:
    """Return name and value of the first field that exists."""
    for name in names:
        if name in record:
            return name, record[name]
    raise ValueError(f"no field {' or '.join(map(repr, names))}; there are: {', '.join(map(str, record))}")


def _text(record: Mapping[str, Any], *names: str) -> str:
    name, value = _field(record, *names)
    if not isinstance(value, str):
        raise ValueError(f"field {name!r} is not a text but a {type(value).__name__}")
    value.encode()  # a lone surrogate, which no tokenizer takes, is a ValueError
    return value


def _outcome(
    wanted: list[Any] | str, encoded: Iterator[list[int]], task: Task, tokenizer: HuggingFaceTokenizer
) -> Outcome:
    """Make the result of a record from its texts, messages or problem."""
    if isinstance(wanted, str):
        return Outcome([], wanted)
    if task.messages is None:
        return _cut(_framed(list(islice(encoded, len(wanted))), tokenizer), task)
    try:
        return _cut(tokenizer.templated_chat(wanted), task)
    except UsageError:  # the call is wrong, not this record
        raise
    except ValueError as error:
        return Outcome([], str(error))


def _framed(texts: list[list[int]], tokenizer: HuggingFaceTokenizer) -> list[tuple[list[int], bool]]:
    """Return texts between begin and end as pieces, of which the loss counts the last text and the end."""
    begin, end = ([] if token is None else [token] for token in (tokenizer.bos, tokenizer.eos))
    return [(begin, False), *[(tokens, False) for tokens in texts[:-1]], (texts[-1], True), (end, True)]


def _cut(pieces: list[tuple[list[int], bool]], task: Task) -> Outcome:
    tokens = np.array(list(chain.from_iterable(piece for piece, _ in pieces)), dtype=np.int32)
    mask = np.repeat(np.array([counted for _, counted in pieces], dtype=np.uint8), [len(piece) for piece, _ in pieces])
    if not mask.any():
        return Outcome([], "no token of it counts in the loss")
    most = len(tokens) if task.max_length is None or task.too_long == "keep" else task.max_length
    too_long = len(tokens) > most
    if too_long and task.too_long == "drop":
        return Outcome([], too_long=True)
    if too_long and not mask[:most].any():
        return Outcome([], f"the prompt alone has more than {most} tokens", too_long=True)
    masked, starts = task.kind == "sft", range(0, len(tokens), most) if task.too_long == "split" else (0,)
    parts = [slice(start, start + most) for start in starts]
    return Outcome([Example(tokens[part], mask[part] if masked else None) for part in parts], too_long=too_long)
