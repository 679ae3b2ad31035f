"""Measured micro-batches: what is in them, how long they took on all ranks, and the costs that follow."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from energon_lite.errors import UsageError
from energon_lite.extras.balance import micro_batch_times, read_cost_model, read_micro_batches
from energon_lite.extras.balance.micro_batch_times import PassTimes, cost_model_of, micro_batch_numbers
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.interface import MultimodalBatch
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.training.config import config_from_dict
from energon_lite.trainer.training.pipeline import run_pipeline
from energon_lite.trainer.training.throughput import training_flops
from tests.testing import nightly_but
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.small_runs import train

SHAPE = ModelConfig(hidden_size=8, num_layers=2, num_heads=2, ffn_size=16, vocab_size=300, image_size=8, patch_size=2)


def batch(documents: list[list[int]] | None, images: list[tuple[int, int]]) -> MultimodalBatch:
    tokens = torch.zeros(2, 10, dtype=torch.int64)
    return MultimodalBatch(
        __key__=[],
        __restore_key__=(),
        tokens=tokens,
        labels=tokens,
        loss_mask=torch.cat([torch.ones(2, 4), torch.zeros(2, 6)], dim=1),
        image=torch.zeros(len(images), 3, 8, 8),
        image_rows=torch.zeros(len(images), dtype=torch.int64),
        image_starts=torch.zeros(len(images), dtype=torch.int64),
        documents=None if documents is None else torch.tensor(documents),
        image_sizes=images if images != [(8, 8)] * len(images) else None,
    )


def test_what_is_in_a_micro_batch() -> None:
    found = micro_batch_numbers(batch(None, [(8, 8), (4, 6)]), SHAPE)
    assert found == {
        **{"tokens": 20, "squared_tokens": 200, "segments": 2, "loss_tokens": 8},
        **{"images": 2, "patches": 16 + 6, "squared_patches": 256 + 36},
    }
    packed = [[0] * 3 + [1] * 7, [1] * 4 + [2] * 6]  # a row's end ends a document
    found = micro_batch_numbers(batch(packed, [(8, 8)]), SHAPE)
    assert (found["tokens"], found["segments"], found["squared_tokens"]) == (20, 4, 9 + 49 + 16 + 36)
    assert (found["images"], found["patches"]) == (1, 16)


def test_costs_by_the_shape_are_those_that_mfu_counts() -> None:
    model = cost_model_of(SHAPE)
    numbers = {name: [value] for name, value in micro_batch_numbers(batch(None, []), SHAPE).items()}
    nanoseconds = model.micro_batch_costs(numbers)[0]
    assert nanoseconds == pytest.approx(training_flops(SHAPE, 20, 2 * 55) / 4e14 * 1e9, abs=2)


def test_passes_are_added_up_by_micro_batch() -> None:
    model = LlamaModel(SHAPE, ParallelMesh(), seed=0)
    passes, empty = PassTimes(torch.device("cpu")), batch(None, [])
    empty.tokens = empty.tokens[:0]
    run_pipeline(model, [batch(None, []), empty, batch(None, [])], record=passes)
    first, nothing, last = passes.seconds(3)
    assert first > 0 and last > 0 and nothing == 0


@pytest.mark.parametrize(
    ("mesh", "world"), nightly_but({1}, [({}, 2), ({"pp": 2}, 4), ({"tp": 2, "pp": 2, "virtual": 2}, 4)])
)
def test_a_run_measures_and_fits(
    run_ranks: RunRanks,
    leaf_of: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mesh: dict[str, int],
    world: int,
) -> None:
    """By a clock of the test's, each pass takes a millisecond."""
    clock = itertools.count(0.0, 1e-3).__next__
    monkeypatch.setattr(micro_batch_times, "time", SimpleNamespace(thread_time=clock))
    shape = {"hidden_size": 16, "num_layers": 4, "num_heads": 2, "ffn_size": 32}
    config = config_from_dict(
        {
            "output": str(tmp_path / "run"),
            "data": {"path": str(leaf_of(40)), "micro_batch_size": 3, "workers": 0, "max_length": 12},
            "mesh": mesh,
            "model": shape,
            "train": {"steps": 7, "measure_costs": 2},
        }
    )

    run_ranks(world, lambda rank: train(config))
    costs = (tmp_path / "run/costs-000007.json").read_bytes()
    run_ranks(world, lambda rank: train(config))  # which has no step to do, and writes nothing over
    assert (tmp_path / "run/costs-000007.json").read_bytes() == costs
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "rank_balance" in line] == [2, 4, 6]
    assert all(0 < line["rank_balance"] <= 1 and line["cost_error"] >= 0 for line in lines if "rank_balance" in line)
    sizes, seconds, prior = read_micro_batches(tmp_path / "run/micro_batches.jsonl")
    assert prior == cost_model_of(config.model)
    assert len(seconds) == 3 * 4 and min(seconds) > 0
    assert sum(sizes["loss_tokens"]) == sum(line["tokens"] for line in lines if "rank_balance" in line)
    fitted = read_cost_model(tmp_path / "run/costs-000007.json")
    assert fitted.micro_batch_costs(sizes) / 1e9 == pytest.approx(seconds, rel=0.01)


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_file_of_measured_steps(tmp_path: Path) -> None:
    old = {"place": "2 ranks", "seconds": [9.0], "sizes": {"tokens": [9]}}
    new = {"place": "4 ranks", "seconds": [1.0, 0.0, 2.0], "sizes": {"tokens": [1, 0, 2]}}
    more = {"place": "4 ranks", "seconds": [3.0], "sizes": {"tokens": [3], "images": [1]}}
    path = write(tmp_path / "times.jsonl", old, new, more)
    with open(path, "a") as stream:
        stream.write('{"seconds": [')  # a crash
    assert read_micro_batches(path) == ({"tokens": [1, 2, 3], "images": [0, 0, 1]}, [1.0, 2.0, 3.0], None)
    for wrong in (
        {},
        {"seconds": ["long"], "sizes": {}},
        {"seconds": [1.0], "sizes": {"tokens": []}},
        {**more, "prior": 1},
    ):
        with pytest.raises(UsageError, match="line 1"):
            read_micro_batches(write(path, wrong))
    with pytest.raises(UsageError, match="measure some steps"):
        read_micro_batches(tmp_path / "nothing")
