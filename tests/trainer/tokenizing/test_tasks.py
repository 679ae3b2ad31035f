"""From records to tokens and masks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import DatasetError, UsageError
from energon_lite.trainer.tokenizing.tasks import Task, examples_of
from energon_lite.trainer.tokenizing.tokenizer import HuggingFaceTokenizer, fingerprint_of

BEGIN, END = 256, 257


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(str(tokenizer_folder))


def _plain(outcome: Any) -> Any:
    return [(one.tokens.tolist(), None if one.mask is None else one.mask.tolist()) for one in outcome.examples]


def test_prompt_and_response(tokenizer: HuggingFaceTokenizer) -> None:
    records = [{"prompt": "ab", "response": "c"}, {"prompt": "", "response": "d"}]
    first, second = examples_of(records, Task(), tokenizer)
    assert _plain(first) == [([BEGIN, 97, 98, 99, END], [0, 0, 0, 1, 1])]
    assert _plain(second) == [([BEGIN, 100, END], [0, 1, 1])]


def test_a_prompt_of_several_fields_leaves_out_empty_ones(tokenizer: HuggingFaceTokenizer) -> None:
    task = Task(prompt=("instruction", "input"), response="output")
    records = [{"instruction": "a", "input": given, "output": "c"} for given in ("b", "")]
    assert [outcome.examples[0].tokens.tolist() for outcome in examples_of(records, task, tokenizer)] == [
        [BEGIN, 97, 10, 98, 99, END],
        [BEGIN, 97, 99, END],
    ]


def test_plain_text_has_no_mask(tokenizer: HuggingFaceTokenizer) -> None:
    (outcome,) = examples_of([{"content": "hé"}], Task(kind="pt"), tokenizer)
    assert _plain(outcome) == [([BEGIN, 104, 0xC3, 0xA9, END], None)]


def test_a_conversation_counts_what_the_assistant_says(tokenizer: HuggingFaceTokenizer) -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "?"},
    ]
    (outcome,) = examples_of([{"m": messages}], Task(messages="m"), tokenizer)
    (example,) = outcome.examples
    whole = "<system>S</s><user>q</s><assistant>yes</s><user>r</s><assistant>no</s><user>?</s>"
    assert example.tokens.tolist() == tokenizer.encode_texts([whole])[0]
    counted = example.tokens[example.mask == 1].tolist()
    assert counted == [*b"yes", END, *b"no", END]


def test_the_assistant_may_begin(tokenizer: HuggingFaceTokenizer) -> None:
    (outcome,) = examples_of([{"m": [{"role": "assistant", "content": "x"}]}], Task(messages="m"), tokenizer)
    assert outcome.examples[0].mask.all()


@given(st.text(st.characters(codec="utf-8"), max_size=30), st.integers(2, 12))
def test_a_text_in_parts_is_the_text(tokenizer: HuggingFaceTokenizer, text: str, most: int) -> None:
    task = Task(kind="pt", max_length=most, too_long="split")
    (whole,) = examples_of([{"content": text}], Task(kind="pt"), tokenizer)
    (parts,) = examples_of([{"content": text}], task, tokenizer)
    assert [token for example in parts.examples for token in example.tokens] == whole.examples[0].tokens.tolist()
    assert all(len(example.tokens) == most for example in parts.examples[:-1])
    assert parts.too_long == (len(whole.examples[0].tokens) > most)


@pytest.mark.parametrize(
    "too_long, tokens", [("keep", [BEGIN, 97, 98, 99, END]), ("truncate", [BEGIN, 97, 98, 99]), ("drop", None)]
)
def test_an_example_that_is_too_long(tokenizer: HuggingFaceTokenizer, too_long: Any, tokens: list[int] | None) -> None:
    record = {"prompt": "ab", "response": "c"}
    (outcome,) = examples_of([record], Task(max_length=4, too_long=too_long), tokenizer)
    assert [example.tokens.tolist() for example in outcome.examples] == ([] if tokens is None else [tokens])
    assert outcome.too_long == (too_long != "keep")


@pytest.mark.parametrize(
    "record, task, problem",
    [
        ({"question": "a"}, Task(), "no field 'prompt'; there are: question"),
        ({"prompt": 3, "response": ""}, Task(), "field 'prompt' is not a text but a int"),
        ({"prompt": "abcd", "response": "e"}, Task(max_length=4), "the prompt alone has more than 4 tokens"),
        ({"m": "hello"}, Task(messages="m"), "not a list of messages"),
        ({"m": [{"role": "user", "content": "q"}]}, Task(messages="m"), "no token of it counts in the loss"),
        ({"m": [{"role": "user"}]}, Task(messages="m"), "the chat template fails"),
    ],
)
def test_a_record_that_does_not_fit_is_named_and_harms_no_other(
    record: dict[str, Any], task: Task, problem: str, tokenizer: HuggingFaceTokenizer
) -> None:
    good = {"prompt": "a", "response": "b", "m": [{"role": "assistant", "content": "x"}]}
    before, bad, after = examples_of([good, record, good], task, tokenizer)
    assert problem in bad.problem and not bad.examples
    assert _plain(before) == _plain(after) and before.examples


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"kind": "rl"}, "the task is 'rl'"),
        ({"max_length": 1}, "give at least 2"),
        ({"too_long": "fold"}, "give keep, truncate, drop or split"),
        ({"too_long": "split"}, "an example with a prompt cannot be split"),
    ],
)
def test_tasks_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Task(**settings)


def test_special_tokens_can_be_chosen(tokenizer_folder: Path) -> None:
    without = HuggingFaceTokenizer(str(tokenizer_folder / "tokenizer.json"), begin="", end="a")
    (outcome,) = examples_of([{"prompt": "x", "response": "y"}], Task(), without)
    assert outcome.examples[0].tokens.tolist() == [120, 121, 97]
    with pytest.raises(UsageError, match="no token '<eod>' for the end"):
        HuggingFaceTokenizer(str(tokenizer_folder), end="<eod>")


def test_a_tokenizer_without_a_chat_template_is_no_fault_of_the_records(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tokenizer_folder, tmp_path / "copy"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match="has no chat template"):
        examples_of(
            [{"m": [{"role": "assistant", "content": "x"}]}], Task(messages="m"), HuggingFaceTokenizer(str(folder))
        )


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no tokenizer here"):
        HuggingFaceTokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DatasetError, match="this is not a tokenizer"):
        HuggingFaceTokenizer(str(tmp_path))


def test_the_fingerprint_sees_each_file(tokenizer_folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tokenizer_folder, tmp_path / "copy"))
    assert fingerprint_of(str(copy)) == fingerprint_of(str(tokenizer_folder))
    config = copy / "tokenizer_config.json"
    config.write_text(config.read_text().replace("<s>", "</s>"))
    assert fingerprint_of(str(copy)) != fingerprint_of(str(tokenizer_folder))
