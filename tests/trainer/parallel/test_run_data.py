"""Runs on any data by any hooks: a user's encoder, chats in JSONL, several validation sets with a limit; and batches by
tokens, whose packed rows are what padded rows are, on every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from energon_lite.errors import ConfigError
from energon_lite.trainer import Trainer, TrainerConfig, learning_rate
from tests.testing import nightly_but
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.small_runs import BATCHING, SmallRuns, assert_same_metrics, make_config, metrics, train

#: A user's module. Its encoder returns what the library makes of sequences; a mistake is made where a test says so.
MODULE = """
import torch
from energon_lite import Cooker, TaskEncoder, TextSample, basic_sample_keys, cooker
from energon_lite.batching import TokenSequence, next_token_pairs
from energon_lite import pad_sequences

@cooker
def cook(sample):
    return TextSample(**basic_sample_keys(sample), text=sample["json"]["said"])

class Own(TaskEncoder):
    cookers = [Cooker(cook)]

    def __init__(self, tokenizer, training, mistake=""):
        self.tokenizer, self.mistake = tokenizer, mistake

    def encode_sample(self, sample):
        if self.mistake == "encode":
            return sample.words  # the mistake
        tokens, labels, mask = next_token_pairs(torch.tensor(self.tokenizer.encode(sample.text)))
        return TokenSequence.derive_from(sample, tokens=tokens, labels=labels, loss_mask=mask)

    def batch(self, samples):
        if self.mistake == "batch":
            return {"tokens": [sample.tokens for sample in samples]}
        return pad_sequences(samples, pad=self.tokenizer.pad)
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


def config(folder: Path, output: str, *, data: dict[str, Any] | None = None, **settings: Any) -> TrainerConfig:
    given = {
        "val": {name: str(folder / f"{name}.jsonl") for name in ("one", "two")},
        "task_encoder": "own_rows:Own",
        "micro_batch_size": 2,
        "max_length": 64,
    }
    model = {"num_layers": 2, "dtype": "float64", "image_size": 0, "tie_embeddings": False}
    settings = {"steps": 3, "save_every": 0, "eval_every": 3, "eval_batches": 3} | settings
    return make_config(folder / "train.jsonl", folder / output, data=given | (data or {}), model=model, **settings)


def assert_same(one: TrainerConfig, other: TrainerConfig) -> None:
    assert_same_metrics(metrics(Path(one.output)), metrics(Path(other.output)), 1e-6, 1e-6)


@pytest.mark.parametrize(
    ("world", "mesh"), nightly_but({2}, [(2, {}), (2, {"tp": 2}), (4, {"pp": 2}), (4, {"cp": 2})]), ids=str
)
def test_a_limited_evaluation_is_the_same_on_every_layout(
    run_ranks: RunRanks, said: Path, world: int, mesh: dict[str, int]
) -> None:
    """Three micro-batches of two samples: with two replicas, the second one has one of them only."""
    alone, together = config(said, "alone", eval_at_start=True), config(said, "together", mesh=mesh, eval_at_start=True)
    assert run_ranks(1, lambda rank: train(alone)) == [3]
    assert run_ranks(world, lambda rank: train(together)) == [3] * world
    assert_same(alone, together)
    lines = metrics(Path(alone.output))
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    evaluated = {f"{key}/{name}" for key in ("eval_loss", "eval_tokens") for name in ("one", "two")}
    assert lines[0].keys() == {"step", *evaluated} and evaluated < lines[3].keys() and not evaluated & lines[2].keys()
    for name in ("one", "two"):
        # A text of n bytes has begin and end, so n + 1 labels.
        texts = [f"{name} says {n * n}"[: 5 + n % 9] for n in range(6)]
        assert lines[0][f"eval_tokens/{name}"] == sum(len(text) + 1 for text in texts)
        assert lines[3][f"eval_loss/{name}"] < lines[0][f"eval_loss/{name}"]


def test_without_a_limit_all_is_evaluated_each_time_and_not_again_on_resuming(run_ranks: RunRanks, said: Path) -> None:
    unlimited = {"eval_at_start": True, "eval_batches": 0, "eval_every": 1}
    first = config(said, "run", data={"val_path": str(said / "two.jsonl")}, steps=2, **unlimited)
    assert run_ranks(1, lambda rank: train(first)) == [2]
    assert run_ranks(1, lambda rank: train(config(said, "run", **unlimited))) == [3]
    lines = metrics(said / "run")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert {line["eval_tokens/one"] for line in lines} == {lines[0]["eval_tokens/one"]}
    assert all(line["eval_loss"] == line["eval_loss/two"] for line in lines[:3]) and "eval_loss" not in lines[3]


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
    assert metrics(tmp_path / "run")[2]["eval_tokens"] > 0


# -- batches by tokens -------------------------------------------------------------------------------------------------

OPTIMIZER = {"scale_rule": "sqrt", "reference_tokens": 100}
#: Sections of a run whose batches are made by tokens, but for its data.
TOKENS: dict[str, Any] = {"model": {"num_layers": 4}, "optimizer": OPTIMIZER}


@pytest.mark.parametrize(
    ("world", "mesh"),
    nightly_but(
        {2, 4},
        [
            (1, {}),
            (2, {"tp": 2, "sequence_parallel": True}),
            (2, {"cp": 2}),
            (2, {"pp": 2, "virtual": 2}),
            (8, {"tp": 2, "cp": 2, "pp": 2}),
        ],
    ),
    ids=str,
)
def test_packed_and_padded_rows_make_one_run(runs: SmallRuns, world: int, mesh: dict[str, Any]) -> None:
    """The same samples, images among them, in both forms: losses, gradients and evaluation."""
    for name, packed, sizes, ranks in (("padded", False, {}, 1), ("packed", True, mesh, world)):
        data = {"task_encoder": "energon_lite.trainer:MultimodalTaskEncoder", "task_encoder_args": {"packed": packed}}
        model = {"num_layers": 4, "dtype": "float64"}
        assert runs.train(ranks, name=name, mesh=sizes, data=data, model=model, steps=4, eval_every=4) == [4] * ranks
    assert_same_metrics(runs.metrics("padded"), runs.metrics("packed"), rel=1e-9, of_norms=1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("strategy", "world", "mesh", "share"),
    nightly_but(
        {0, 5},
        [
            ("capacity", 4, {"tp": 2, "sequence_parallel": True}, "load"),
            ("capacity", 4, {"pp": 2, "virtual": 2}, "load"),
            ("best_fit", 2, {}, "load"),
            ("best_fit", 2, {"cp": 2}, "broadcast"),
            ("best_fit", 8, {"tp": 2, "pp": 2}, "load"),
            ("cost", 8, {"pp": 2, "cp": 2}, "broadcast"),
        ],
    ),
    ids=str,
)
def test_each_layout_makes_the_run_of_one_process(
    runs: SmallRuns, strategy: str, world: int, mesh: dict[str, Any], share: str
) -> None:
    settings = TOKENS | {"steps": 4, "save_every": 0, "eval_every": 2}
    data = {"batching": BATCHING[strategy], "share": share}
    for name, sizes, ranks in (("alone", {}, 1), ("together", mesh, world)):
        assert runs.train(ranks, name=name, mesh=sizes, data=data, **settings) == [4] * ranks
    lines = runs.metrics("alone")
    assert len({entry["tokens"] for entry in lines}) > 1, "sizes that do not vary prove nothing"
    for entry in lines:
        planned = learning_rate(entry["step"] - 1, 4, runs.config(**settings).optimizer)
        assert entry["lr"] == pytest.approx(planned * (entry["tokens"] / 100) ** 0.5)
    assert_same_metrics(lines, runs.metrics("together"))


@pytest.mark.usefixtures("measured")
def test_a_strategy_that_cannot_be_is_refused(runs: SmallRuns) -> None:
    data = {"batching": {"strategy": "best_fit", "capcity": 40}}
    (text,) = runs.errors(ConfigError, 1, data=data, **TOKENS)
    assert "data.batching.capcity" in text


def test_lengths_that_nobody_measured_are_asked_for(runs: SmallRuns) -> None:
    with pytest.raises(RankFailure, match="energon-lite measure"):
        runs.train(1, data={"batching": BATCHING["best_fit"]}, **TOKENS)
