"""From files to records, and from records to tokens and masks; who says what in a conversation that is one text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import DatasetError, UsageError
from energon_lite.trainer.tokenizing import records
from energon_lite.trainer.tokenizing.records import find_blocks, read_block
from energon_lite.trainer.tokenizing.tasks import Task, examples_of
from energon_lite.trainer.tokenizing.tokenizer import HuggingFaceTokenizer, fingerprint_of
from tests.testing import examples
from tests.trainer.tokenizing.conftest import BEGIN, END

# -- files, cut into blocks: every record once, in order, wherever the cuts are ----------------------------------------


def _all(paths: list[Path], size: int, **settings: Any) -> list[Any]:
    blocks = find_blocks([str(path) for path in paths], records=size, **settings)
    return [record for block in blocks for record in read_block(block)]


texts = st.lists(st.text(st.characters(exclude_characters="\n\r", codec="utf-8"), max_size=5), max_size=12)


@given(texts, st.integers(1, 5), st.booleans(), st.sampled_from([1, 3, 1 << 24]))
def test_every_line_of_jsonl_is_a_record_of_one_block(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], size: int, ended: bool, chunk: int
) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "some.jsonl"
    text = "\n".join(json.dumps({"x": line}) if line else "" for line in lines)
    path.write_text(text + "\n" * ended, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_CHUNK", chunk)
        blocks = find_blocks([str(path)], records=size)
    found = [list(read_block(block)) for block in blocks]
    assert [(record.number, record.fields) for block in found for record in block] == [
        (number, {"x": line}) for number, line in enumerate(lines, start=1) if line
    ]
    assert all(len(block) <= size for block in found)


def test_lines_that_are_no_records_say_why(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(b'{"a": 1}\n[1]\n{"a": \n\n"x"\n' + b"[" * 100_000)
    found = _all([path], 10)
    assert [record.number for record in found] == [1, 2, 3, 5, 6]
    problems = [record.problem.split(":")[0] for record in found]
    assert problems == ["", "not an object but a list", "not JSON", "not an object but a str", "not JSON"]


def test_text_files_are_records_or_their_lines_are(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\r\n".encode())
    (tmp_path / "b.md").write_bytes(b"three")
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    paths = sorted(tmp_path.iterdir())
    whole = _all(paths, 2)
    assert [record.fields and record.fields["content"] for record in whole] == ["one\r\ntwo\r\n", "three", None]
    assert [(record.file, record.number) for record in whole] == [(0, 1), (1, 1), (2, 1)]
    assert "not UTF-8" in whole[2].problem
    lines = _all(paths[:2], 1, text_records="line")
    found = [(record.file, record.number, record.fields["content"]) for record in lines]
    assert found == [(0, 1, "one"), (0, 2, "two"), (1, 1, "three")]


@given(st.lists(st.integers(0, 4), max_size=5), st.integers(1, 6))
def test_parquet_files_are_cut_between_row_groups(
    tmp_path_factory: pytest.TempPathFactory, groups: list[int], size: int
) -> None:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    path = tmp_path_factory.mktemp("parquet") / "some.parquet"
    schema = pa.schema([("x", pa.int64())])
    rows = 0
    with ParquetWriter(path, schema) as writer:
        for count in groups:
            writer.write_table(pa.table({"x": list(range(rows, rows + count))}, schema), row_group_size=max(1, count))
            rows += count
    found = _all([path], size)
    assert [(record.number, record.fields) for record in found] == [(x + 1, {"x": x}) for x in range(rows)]


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"some.csv is not of a kind.*\n.*\*\.jsonl"):
        find_blocks([str(tmp_path / "some.csv")], records=1)
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(DatasetError, match="the Parquet file cannot be read"):
        find_blocks([str(tmp_path / "bad.parquet")], records=1)
    path = tmp_path / "short.jsonl"
    path.write_text('{"a": 1}\n' * 5)
    (block,) = find_blocks([str(path)], records=10)
    path.write_text('{"a": 1}\n')
    with pytest.raises(DatasetError, match="has become shorter"):
        list(read_block(block))


# -- records, and their tokens -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(str(tokenizer_folder))


def _plain(outcome: Any) -> Any:
    return [(one.tokens.tolist(), None if one.mask is None else one.mask.tolist()) for one in outcome.examples]


PAIR = Task(prompt=("instruction", "input"), response="output")
#: Records of tasks, and their tokens and masks.
EXAMPLES: list[tuple[Task, dict[str, Any], list[int], list[int] | None]] = [
    (Task(), {"prompt": "ab", "response": "c"}, [BEGIN, 97, 98, 99, END], [0, 0, 0, 1, 1]),
    (Task(), {"prompt": "", "response": "d"}, [BEGIN, 100, END], [0, 1, 1]),
    (PAIR, {"instruction": "a", "input": "b", "output": "c"}, [BEGIN, 97, 10, 98, 99, END], [0, 0, 0, 0, 1, 1]),
    (PAIR, {"instruction": "a", "input": "", "output": "c"}, [BEGIN, 97, 99, END], [0, 0, 1, 1]),
    (Task(kind="pt"), {"content": "hé"}, [BEGIN, 104, 0xC3, 0xA9, END], None),
    (
        Task(messages="m"),
        {"m": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]},
        [*b"<user>q", END, *b"<assistant>yes", END],
        [0] * 19 + [1] * 4,
    ),
    # The assistant may begin.
    (Task(messages="m"), {"m": [{"role": "assistant", "content": "x"}]}, [*b"<assistant>x", END], [1] * 13),
]


@pytest.mark.parametrize(("task", "record", "tokens", "mask"), EXAMPLES)
def test_a_record_is_its_tokens_and_what_of_them_counts(
    tokenizer: HuggingFaceTokenizer, task: Task, record: dict[str, Any], tokens: list[int], mask: list[int] | None
) -> None:
    (outcome,) = examples_of([record], task, tokenizer)
    assert _plain(outcome) == [(tokens, mask)]


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
        ({"m": []}, Task(messages="m"), "not a list of messages"),
        ({"m": [{"content": "q"}]}, Task(messages="m"), "not a list of messages"),
        ({"m": [{"role": "user", "content": "q"}]}, Task(messages="m"), "no token of it counts in the loss"),
        ({"m": [{"role": "user"}]}, Task(messages="m"), "the chat template fails"),
        # Half of an emoji, as JSON of a text that was cut has it.
        ({"prompt": "a\ud83d", "response": "b"}, Task(), "surrogates not allowed"),
        ({"m": [{"role": "assistant", "content": "\ud83d"}]}, Task(messages="m"), "surrogates not allowed"),
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
    assert HuggingFaceTokenizer(str(tokenizer_folder), end="").pad == 0
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
    (folder / "chat_template.jinja").write_text(settings["tokenizer_class"])
    assert HuggingFaceTokenizer(str(folder)).has_chat_template


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


# -- conversations, of which the text is tokenised at once -------------------------------------------------------------

MARK = "<image>"
MERGED = (
    "{% for m in messages %}{{ '[' + m['role'] + ']\n' + m['content'] + ' \n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


def written(messages: list[dict[str, str]]) -> str:
    """What the template makes of messages."""
    return "".join(f"[{one['role']}]\n{one['content']} \n\n" for one in messages)


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    """A tokenizer whose tokens are words and runs of spaces and line ends, across what the template writes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    folder = tmp_path_factory.mktemp("merging")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # tokens begin behind their space
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([Path(json.__file__).read_text(), "]\n a \n\n[user]\n \n\n[assistant]\n"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": MERGED}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return HuggingFaceTokenizer(str(folder))


def test_a_space_at_the_end_of_a_message_belongs_to_it(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # says that a space begins behind itself
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    made = HuggingFaceTokenizer(str(tmp_path))
    said = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]
    assert [piece for piece, _ in made.chat(said) if piece] == made.encode_texts(["ab ", "c ", "d "])


turns = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text("ab é\n\U0001f600", max_size=6)),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, max_examples=examples(100))
@given(turns, st.booleans())
def test_pieces_are_those_of_the_text(merging: HuggingFaceTokenizer, said: list[tuple[str, str]], shown: bool) -> None:
    messages = [{"role": role, "content": text + MARK * shown} for role, text in said]
    pieces = merging.chat(messages, MARK if shown else None)
    tokens = [token for piece, _ in pieces for token in piece]
    parts = [merging.encode_texts([part])[0] for part in written(messages).split(MARK)]
    joined: list[int] = []
    for place, part in enumerate(parts):
        joined += [-1] * (place > 0) + part
    assert tokens == joined
    answers = [piece for piece, answer in pieces if answer]
    assert len(answers) == sum(role == "assistant" for role, _ in said)
    assert all(piece.count(-1) == shown for piece in answers)


def answers_by_prefixes(tokenizer: HuggingFaceTokenizer, messages: list[dict[str, str]]) -> list[list[int]] | None:
    """The answers' tokens, as those that the text has more with them than without; None where tokens are merged."""
    found = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before = written(messages[:place]) + "[assistant]\n"
            short, long = tokenizer.encode_texts([before, before + message["content"] + " \n\n"])
            everything = tokenizer.encode_plain(written(messages))
            if long[: len(short)] != short or everything[: len(long)] != long:
                return None
            found.append(long[len(short) :])
    return found


@settings(deadline=None, max_examples=examples(100))
@given(turns)
def test_answers_are_what_the_text_has_more_with_them(merging: HuggingFaceTokenizer, said: Any) -> None:
    messages = [{"role": role, "content": text} for role, text in said]
    if messages[0]["role"] == "assistant":
        messages.insert(0, {"role": "user", "content": "a"})
    wanted = answers_by_prefixes(merging, messages)
    if wanted is not None:
        assert [piece for piece, answer in merging.chat(messages) if answer] == wanted


def test_a_long_conversation_is_tokenised_once(merging: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": role, "content": f"word {turn}"} for turn in range(100) for role in ("user", "assistant")]
    counting = mock.Mock(wraps=merging._tokenizer)
    monkeypatch.setattr(merging, "_tokenizer", counting)
    pieces = merging.chat(messages)
    assert sum(answer for _, answer in pieces) == 100
    assert sum(len(call.args[0]) for call in counting.encode.call_args_list) == len(written(messages))
