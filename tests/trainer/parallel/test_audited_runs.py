"""Runs of the trainer that are audited: the same samples on any layout, and what a fault leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite.batching.digests import AddressList
from energon_lite.loading.iterators.planned_dataset import PlannedDataset
from energon_lite.trainer import TrainerConfig, config_from_dict, latest_checkpoint, read_state
from tests.testing import command, nightly_but
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.small_runs import train

SAMPLES = 30


@pytest.fixture
def lines(tmp_path: Path, write_dataset: Callable[..., Path]) -> Path:
    shards = {"a.tar": [(f"t{number:03d}", {"txt": b"line %d" % number}) for number in range(SAMPLES)]}
    write_dataset(tmp_path / "lines", shards, splits={"train": ["a.tar"]})
    return tmp_path / "lines"


def config_of(lines: Path, output: Path, steps: int, *, mesh: dict[str, int], share: str = "load") -> TrainerConfig:
    data = {"path": str(lines), "micro_batch_size": 2, "micro_batches_per_step": 4, "max_length": 12, "workers": 0}
    data |= {"share": share}
    model = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "ffn_size": 16}
    train = {"steps": steps, "save_every": 2, "async_save": False}
    return config_from_dict(
        {"seed": 3, "output": str(output), "data": data, "model": model, "mesh": mesh, "train": train}
    )


def digests(output: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["digest"]) for line in map(json.loads, (output / "metrics.jsonl").open())]


def audit(*arguments: object) -> tuple[int, str]:
    return command("audit", *arguments)


@pytest.mark.parametrize("share", nightly_but({1}, ["load", "broadcast"]))
def test_runs_on_other_ranks_have_equal_digests_and_a_fault_is_found(
    run_ranks: RunRanks, lines: Path, tmp_path: Path, share: str
) -> None:
    assert run_ranks(1, lambda rank: train(config_of(lines, tmp_path / "alone", 6, mesh={}))) == [6]
    moved = tmp_path / "moved"
    assert run_ranks(2, lambda rank: train(config_of(lines, moved, 4, mesh={}))) == [4] * 2
    assert run_ranks(4, lambda rank: train(config_of(lines, moved, 6, mesh={"tp": 2, "pp": 2}, share=share))) == [6] * 4
    assert digests(tmp_path / "alone") == digests(moved) and len(digests(moved)) == 6
    for run in (tmp_path / "alone", moved):
        code, said = audit(run)
        assert code == 0 and "6 steps, steps 1 to 6" in said and "exactly the samples" in said
    assert audit(moved, "--against", tmp_path / "alone")[0] == 0
    if share == "broadcast":
        return

    def with_a_fault(rank: int) -> int:
        if rank == 1:
            PlannedDataset.jobs = doubled(PlannedDataset.jobs, at=9)  # type: ignore[method-assign]
        return train(config_of(lines, tmp_path / "faulty", 6, mesh={}))

    assert run_ranks(2, with_a_fault) == [6] * 2
    differing = [a for a, b in zip(digests(moved), digests(tmp_path / "faulty"), strict=True) if a != b]
    assert [step for step, _ in differing] == [3]  # micro-batches 8 to 11
    code, said = audit(tmp_path / "faulty")
    assert code == 1 and "step 3: not the samples" in said and "was lost" in said and "instead" in said
    code, said = audit(tmp_path / "alone", "--against", tmp_path / "faulty")
    assert code == 1 and "first in step 3 of the one" in said and "faulty: t0" in said
    (tmp_path / "faulty" / "metrics.jsonl").write_text((moved / "metrics.jsonl").read_text())
    code, said = audit(tmp_path / "faulty")
    assert code == 1 and "are not those that the checkpoint after it was made with" in said


def doubled(jobs: Any, at: int) -> Any:
    """Jobs of which micro-batch ``at`` has its first sample twice, in place of the last one."""

    def of(self: PlannedDataset, pass_number: int, places: Any) -> Any:
        made = jobs(self, pass_number, places)
        for job in made:
            if job.number == at:
                leaves, indices, epochs = (list(column) for column in zip(*job.addresses, strict=True))
                object.__setattr__(job, "addresses", AddressList(leaves, indices[:1] + indices[:-1], epochs))
        return made

    return of


def test_a_sample_was_trained_on_when_it_was_in_a_batch(run_ranks: RunRanks, lines: Path, tmp_path: Path) -> None:
    assert run_ranks(1, lambda rank: train(config_of(lines, tmp_path / "run", 7, mesh={}))) == [7]  # 56 samples
    checkpoint = latest_checkpoint(tmp_path / "run/checkpoints")
    assert checkpoint is not None
    assert read_state(checkpoint)["digest"]["step"] == 7
    for until, least in ((7, 1), (4, 1), (2, 0)):
        whole = 0
        for number in range(SAMPLES):
            code, said = audit(tmp_path / "run", "--sample", f"0:{number}", "--until", until, "--json")
            (found,) = json.loads(said)
            assert code == 0 and least <= found["times"] <= least + 1
            assert len(found["appearances"]) == found["times"]
            assert all(one["micro_batch"] < 4 * until for one in found["appearances"])
            assert found["coming"]["micro_batch"] >= 4 * until
            whole += found["times"]
        assert whole == 8 * until
    code, said = audit(tmp_path / "run", "--key", "t007")
    assert code == 0 and "trained on" in said and "t007 (sample 7 of data set 0" in said
    code, said = audit(tmp_path / "run", "--key", "nobody")
    assert code == 1 and "no data set of the run has a sample with this key" in said
