"""Runs on any data by any hooks: a user's encoder, chats in JSONL, several validation sets with a limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from energon_lite.trainer import Trainer, TrainerConfig, config_from_dict
from tests.testing import nightly_but
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.small_runs import train

#: A user's module. Its encoder returns what the library makes of sequences; a mistake is made where a test says so.
MODULE = """
import torch
from energon_lite import Cooker, TaskEncoder, TextSample, basic_sample_keys, cooker
from energon_lite.batching import TokenSequence, next_token_pairs
from energon_lite import pack_sequences, pad_sequences

@cooker
def cook(sample):
    return TextSample(**basic_sample_keys(sample), text=sample["json"]["said"])

class Own(TaskEncoder):
    cookers = [Cooker(cook)]

    def __init__(self, tokenizer, packed, training, mistake=""):
        self.tokenizer, self.packed, self.mistake = tokenizer, packed, mistake

    def encode_sample(self, sample):
        if self.mistake == "encode":
            return sample.words  # the mistake
        tokens, labels, mask = next_token_pairs(torch.tensor(self.tokenizer.encode(sample.text)))
        return TokenSequence.derive_from(sample, tokens=tokens, labels=labels, loss_mask=mask)

    def batch(self, samples):
        if self.mistake == "batch":
            return {"tokens": [sample.tokens for sample in samples]}
        make = pack_sequences if self.packed else pad_sequences
        return make(samples, pad=self.tokenizer.pad)
"""


def write_lines(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lines with a field that no built-in cooker knows, validation sets of 11 and 7 samples, and a user's module."""
    for name, count in (("train", 40), ("one", 11), ("two", 7)):
        write_lines(tmp_path / f"{name}.jsonl", [{"said": f"{name} says {n * n}"[: 5 + n % 9]} for n in range(count)])
    (tmp_path / "own_rows.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def config(folder: Path, output: str, *, data: dict[str, Any] | None = None, **sections: Any) -> TrainerConfig:
    base: dict[str, Any] = {
        "path": str(folder / "train.jsonl"),
        "val": {name: str(folder / f"{name}.jsonl") for name in ("one", "two")},
        "task_encoder": "own_rows:Own",
        "micro_batch_size": 2,
        "micro_batches_per_step": 4,
        "workers": 0,
    }
    train = {"steps": 3, "eval_every": 3, "eval_batches": 3} | sections.pop("train", {})
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "ffn_size": 48, "dtype": "float64"}
    values = {"output": str(folder / output), "model": shape, "optimizer": {"lr": 5e-3, "warmup": 2}, **sections}
    return config_from_dict(values | {"data": base | (data or {}), "train": train})


def metrics(config: TrainerConfig) -> list[dict[str, Any]]:
    times = {"seconds", "data_wait", "tokens_per_second", "memory_gib"}
    lines = (Path(config.output) / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in times} for line in lines]


def assert_same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len(one) == len(other)
    for mine, its in zip(one, other, strict=True):
        assert mine.keys() == its.keys()
        for key, value in mine.items():
            assert its[key] == (value if key == "digest" else pytest.approx(value, rel=1e-6)), key


@pytest.mark.parametrize(
    ("world", "mesh"), nightly_but({2}, [(2, {}), (2, {"tp": 2}), (4, {"pp": 2}), (4, {"cp": 2})]), ids=str
)
def test_a_limited_evaluation_is_the_same_on_every_layout(
    run_ranks: RunRanks, said: Path, world: int, mesh: dict[str, int]
) -> None:
    """Three micro-batches of two samples: with two replicas, the second one has one of them only."""
    at_start = {"train": {"eval_at_start": True}}
    alone, together = config(said, "alone", **at_start), config(said, "together", mesh=mesh, **at_start)
    assert (
        run_ranks(1, lambda rank: train(alone)) == [3] and run_ranks(world, lambda rank: train(together)) == [3] * world
    )
    lines = metrics(alone)
    assert_same(lines, metrics(together))
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    evaluated = {f"{key}/{name}" for key in ("eval_loss", "eval_tokens") for name in ("one", "two")}
    assert lines[0].keys() == {"step", *evaluated} and evaluated < lines[3].keys() and not evaluated & lines[2].keys()
    wanted = {"one": [5 + n % 9 for n in range(6)], "two": [5 + n % 9 for n in range(6)]}
    for name, lengths in wanted.items():
        # A text of n bytes has begin and end, so n + 1 labels.
        assert lines[0][f"eval_tokens/{name}"] == sum(min(n, len(f"{name} says 0")) + 1 for n in lengths[:4]) + sum(
            min(n, len(f"{name} says 16")) + 1 for n in lengths[4:]
        )
        assert lines[3][f"eval_loss/{name}"] < lines[0][f"eval_loss/{name}"]


def test_without_a_limit_all_is_evaluated_each_time_and_not_again_on_resuming(run_ranks: RunRanks, said: Path) -> None:
    unlimited = {"train": {"eval_at_start": True, "eval_batches": 0, "eval_every": 1, "steps": 2}}
    first = config(said, "run", data={"val_path": str(said / "two.jsonl")}, **unlimited)
    assert run_ranks(1, lambda rank: train(first)) == [2]
    longer = config(said, "run", **{"train": unlimited["train"] | {"steps": 3}})
    assert run_ranks(1, lambda rank: train(longer)) == [3]
    lines = metrics(longer)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert {line["eval_tokens/one"] for line in lines} == {lines[0]["eval_tokens/one"]}
    assert [line["eval_loss"] == line["eval_loss/two"] for line in lines[:3]] == [
        True
    ] * 3 and "eval_loss" not in lines[3]


def test_packed_rows_have_the_losses_of_unpacked_ones(run_ranks: RunRanks, said: Path) -> None:
    padded = config(said, "padded", data={"task_encoder_args": {"packed": False}})
    packed = config(said, "packed", data={"task_encoder_args": {"packed": True}}, mesh={"tp": 2})
    assert run_ranks(1, lambda rank: train(padded)) == [3] and run_ranks(2, lambda rank: train(packed)) == [3, 3]
    assert_same(metrics(padded), metrics(packed))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("encode", ["own_rows.py", "return sample.words  # the mistake", "AttributeError", "'words'"]),
        ("batch", ["own_rows.Own returned a dict", "pad_sequences"]),
    ],
)
def test_a_mistake_of_the_users_shows_the_users_line(
    run_ranks: RunRanks, said: Path, mistake: str, words: list[str], workers: int
) -> None:
    made = config(said, "run", data={"task_encoder_args": {"mistake": mistake}, "workers": workers})
    with pytest.raises(RankFailure) as caught:
        run_ranks(1, lambda rank: train(made))
    for word in words:
        assert word in str(caught.value)


def test_a_run_takes_chats_and_texts_as_they_are(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Records of several kinds in one file; a sample made again is the one that was trained on."""
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    records = [{"messages": chat}, {"text": "a text"}, {"prompt": "a", "response": "b"}, {"other": 1}] * 6
    write_lines(tmp_path / "train.jsonl", records)
    data = {"task_encoder": None, "val": None, "val_path": str(tmp_path / "train.jsonl")}
    made = config(tmp_path, "run", data=data)

    def tokens(rank: int) -> list[list[int]]:
        with Trainer(made) as trainer:
            (batch, *_) = trainer.data.take_step(iter(trainer.loader))
            assert batch is not None
            again = trainer.loader.restore_sample(batch.__restore_key__)
            assert trainer.run() == 3
        return [batch.tokens.tolist(), again.tokens.tolist()]

    once, again = run_ranks(1, tokens)[0]
    assert once == again
    assert metrics(made)[2]["eval_tokens"] > 0
