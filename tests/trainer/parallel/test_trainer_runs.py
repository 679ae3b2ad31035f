"""Whole runs over real shards: resumed, killed, laid out anew, evaluated."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite.errors import StateMismatchError, TopologyError, UsageError
from energon_lite.trainer import Trainer, generate_captions, load_model, load_tokenizer
from energon_lite.trainer.checkpointing.checkpoint import latest_checkpoint
from energon_lite.trainer.training.throughput import flops_of_images, training_flops
from tests.testing import nightly_but
from tests.trainer.parallel.rank_processes import RankFailure
from tests.trainer.parallel.small_runs import (
    BATCHING,
    VAL_SAMPLES,
    WORDS,
    Lines,
    SmallRuns,
    assert_same_metrics,
    line,
    send,
    train,
)


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("mesh", "packed"), nightly_but({1}, [({"tp": 2}, False), ({"tp": 2, "pp": 2}, True)]), ids=str
)
def test_a_killed_run_goes_on_to_the_same_bits(runs: SmallRuns, mesh: dict[str, Any], packed: bool) -> None:
    """All but times, whatever number of workers loads."""
    # Not while training goes on: the second checkpoint is to be there, and the fourth not.
    settings = {"mesh": mesh, "model": {"num_layers": 4}, "eval_every": 2, "async_save": False}
    data = {"batching": BATCHING["best_fit"] if packed else None}
    assert runs.train(4, name="straight", data=data, **settings) == [6] * 4
    lines = runs.metrics("straight")
    assert [entry["step"] for entry in lines] == [1, 2, 3, 4, 5, 6] and "eval_loss" in lines[1]
    assert " ".join(sorted(lines[0])) == "digest grad_norm loss lr micro_batches position step tokens"
    config = runs.config("killed", data=data | {"workers": 1}, **settings)
    with pytest.raises(RankFailure) as failure:
        runs.run_ranks(4, lambda rank: train(config, send(signal.SIGKILL, to_rank=3, at=4)), moment=1.0)
    assert "died without a word" in failure.value.by_rank[3]
    assert runs.saved("killed") == [2]
    assert runs.run_ranks(4, lambda rank: train(config)) == [6] * 4
    assert runs.metrics("killed") == lines


@pytest.fixture(scope="module")
def alone() -> Lines:
    """The run of one process, filled by the first test that needs it: it does not depend on where the data is."""
    return []


@pytest.mark.parametrize(
    ("world", "mesh", "share"),
    nightly_but(
        {2, 4},
        [
            (2, {"pp": 2}, "load"),
            (3, {"pp": 3, "order": "pp-dp"}, "broadcast"),
            (4, {"cp": 2, "order": "dp-cp"}, "broadcast"),
            (4, {"tp": 2, "sequence_parallel": True}, "broadcast"),
            (8, {"tp": 2, "pp": 2, "order": "tp-pp-dp"}, "load"),
        ],
    ),
    ids=str,
)
def test_each_axis_makes_the_same_run(
    runs: SmallRuns, world: int, mesh: dict[str, Any], share: str, alone: Lines
) -> None:
    """Losses, norms, evaluation; from a checkpoint of one process, and with one that one process goes on from."""

    def run(name: str, sizes: dict[str, Any], ranks: int) -> Lines:
        for stop, m, n in ((2, {}, 1), (4, sizes, ranks), (0, {}, 1)):
            settings = {"mesh": m, "data": {"share": share}, "save_every": 0, "eval_every": 3}
            stopping = send(signal.SIGTERM, to_rank=n - 1, at=stop)
            assert runs.train(n, stopping, name=name, **settings) == [stop or 6] * n
        return runs.metrics(name)

    alone += [] if alone else run("alone", {}, 1)
    assert_same_metrics(alone, run("together", mesh, world))
    # The whole split, once. A row has a label per byte and one for the end; at most 12.
    captions = [len(WORDS[number % 3]) + 1 for number in range(VAL_SAMPLES)]
    texts = [min(12, len(line(number)[1]["txt"]) + 1) for number in range(VAL_SAMPLES)]
    first, last = (entry for entry in alone if "eval_loss" in entry)
    assert first["eval_tokens"] == last["eval_tokens"] == sum(captions) + sum(texts)
    assert last["eval_loss"] < first["eval_loss"], "the model learns something"


def test_numbers_for_tensorboard_and_of_the_hardware(runs: SmallRuns) -> None:
    output, model = runs.folder / "run", runs.config().model
    for steps in (2, 3):
        runs.train(2, steps=steps, tensorboard=True, peak_tflops=1e-3)
    lines = [json.loads(text) for text in (output / "metrics.jsonl").read_text().splitlines()]
    # Each of the 12 rows of a step has a prefix of four, and at most twelve positions.
    low, high = (training_flops(model, 12 * n, 12 * n * (n + 1) / 2) for n in (5, 12))
    images = 12 * flops_of_images(model, [(4, 4)])[0]
    low, high = low + images, high + images
    for entry in lines:
        assert entry["tokens_per_second"] == pytest.approx(entry["tokens"] / entry["seconds"])
        assert low < entry["mfu"] * entry["seconds"] * 2 * 1e9 <= high * (1 + 1e-9)
        assert 0.01 < entry["memory_gib"] < 100

    def drawn(rank: int) -> list[tuple[int, float]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(output / "tensorboard"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("loss")]

    (found,) = runs.run_ranks(1, drawn)
    assert [step for step, _ in found] == [1, 2, 3]
    assert [value for _, value in found] == pytest.approx([entry["loss"] for entry in lines])


def test_a_pattern_that_fits_nothing_is_refused(runs: SmallRuns) -> None:
    for text in runs.errors(UsageError, 2, freeze=["norm.*", "head.*"]):
        assert "no parameter is named like 'head.*'" in text


def test_a_resumed_run_must_be_of_the_same_data(runs: SmallRuns) -> None:
    runs.train(1, steps=1)
    runs.path.write_text(runs.path.read_text().replace("weight: 1}", "weight: 2}", 1))
    runs.errors(StateMismatchError, 1, steps=2)


def test_a_resumed_run_must_be_of_the_same_model(runs: SmallRuns) -> None:
    runs.train(1, steps=1)
    other = {"num_layers": 2, "num_heads": 2, "rope_theta": 5e4}
    for text in runs.errors(StateMismatchError, 2, mesh={"pp": 2}, model=other, steps=2):
        assert "num_layers is 3 there, 2 here; num_heads is 4 there, 2 here; rope_theta is 10000.0 there" in text
        assert "step-00000001" in text and "train.init_from_ignore=[num_layers, num_heads, rope_theta]" in text
    same = {"num_kv_heads": 4, "recompute": "full", "dtype": "bfloat16"}
    assert runs.train(1, model=same, steps=2) == [2]


def test_micro_batches_must_be_shared_evenly(runs: SmallRuns) -> None:
    for text in runs.errors(TopologyError, 3):
        assert "4 micro-batches per step cannot be shared evenly by dp=3" in text and "dp of 1, 2, 4" in text


def words_as_tokens(folder: Path) -> str:
    """A tokenizer whose tokens are whole words, with numbers that mean something else as bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    numbers = {"[UNK]": 0, "<s>": 1, "</s>": 2, "grey": 3, "white": 4, "black": 5}
    tokenizer = Tokenizer(models.WordLevel(numbers, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[UNK]", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return str(folder)


@pytest.mark.parametrize("make_tokenizer", nightly_but({1}, [None, words_as_tokens]))
def test_a_model_learns_to_read(runs: SmallRuns, make_tokenizer: Callable[[Path], str] | None) -> None:
    data = {} if make_tokenizer is None else {"tokenizer": make_tokenizer(runs.folder)}
    runs.train(1, data=data, optimizer={"lr": 1e-2}, steps=80, save_every=0)

    def read(rank: int) -> list[str]:
        checkpoint = latest_checkpoint(runs.folder / "run/checkpoints")
        assert checkpoint is not None
        shades = torch.stack([torch.full((3, 4, 4), shade * 127 / 255) for shade in (2, 0, 1, 1)])
        tokenizer = load_tokenizer(checkpoint)
        return generate_captions(load_model(checkpoint), shades, tokenizer=tokenizer, max_new_tokens=9)

    assert runs.run_ranks(1, read) == [["white", "black", "grey", "grey"]]


@pytest.mark.parametrize(("workers", "world"), nightly_but({1, 2}, [(1, 1), (3, 1), (1, 2)]))
def test_a_whole_step_is_under_way_while_the_one_before_it_is_computed(
    runs: SmallRuns, workers: int, world: int
) -> None:
    """However many micro-batches are accumulated; with as few batches ahead as loaders have, it would wait for them."""
    config = runs.config(data={"workers": workers, "micro_batches_per_step": 22})

    def under_way(rank: int) -> list[int]:
        found = []
        with Trainer(config) as trainer:
            encode = trainer.loader.dataset.task_encoder.encode_sample

            def slow(sample: Any) -> Any:
                time.sleep(0.01)  # else workers are given more, because it costs nothing
                return encode(sample)

            trainer.loader.dataset.task_encoder.encode_sample = slow
            batches = iter(trainer.loader)
            for _ in range(2):
                for _ in range(trainer.data.micro_batches):
                    next(batches)
                queue = trainer.loader.stats()["queue"]
                found.append(queue["ready"] + queue["pending"])
        return found

    for found in runs.run_ranks(world, under_way):
        assert all(number >= 22 // world for number in found)
