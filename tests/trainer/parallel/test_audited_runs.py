"""Runs of the trainer that are audited: the same samples on any layout, and what a fault leaves."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite.batching.digests import AddressList
from energon_lite.loading.iterators.planned_dataset import PlannedDataset
from energon_lite.trainer import latest_checkpoint, read_state
from tests.testing import command, nightly_but
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.small_runs import SmallRuns, train

SAMPLES, ROWS = 30, {"micro_batch_size": 2}
SMALL: dict[str, Any] = {"data": ROWS, "model": {"image_size": 0}, "async_save": False}


@pytest.fixture
def lines(run_ranks: RunRanks, tmp_path: Path, write_dataset: Callable[..., Path]) -> SmallRuns:
    shards = {"a.tar": [(f"t{number:03d}", {"txt": b"line %d" % number}) for number in range(SAMPLES)]}
    return SmallRuns(run_ranks, write_dataset(tmp_path / "lines", shards, splits={"train": ["a.tar"]}), tmp_path)


def digests(output: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["digest"]) for line in map(json.loads, (output / "metrics.jsonl").open())]


audit = functools.partial(command, "audit")


@pytest.mark.parametrize("share", nightly_but({1}, ["load", "broadcast"]))
def test_runs_on_other_ranks_have_equal_digests_and_a_fault_is_found(lines: SmallRuns, share: str) -> None:
    tmp_path, moved = lines.folder, lines.folder / "moved"
    assert lines.train(1, name="alone", **SMALL) == [6]
    assert lines.train(2, name="moved", **SMALL | {"steps": 4}) == [4] * 2
    mesh, data = {"tp": 2, "pp": 2}, ROWS | {"share": share}
    assert lines.train(4, name="moved", mesh=mesh, **SMALL | {"data": data}) == [6] * 4
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
        return train(lines.config("faulty", **SMALL))

    assert lines.run_ranks(2, with_a_fault) == [6] * 2
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
                leaves, indices, epochs = zip(*job.addresses, strict=True)
                doubled = zip(leaves, indices[:1] + indices[:-1], epochs, strict=True)
                object.__setattr__(job, "addresses", AddressList(doubled))
        return made

    return of


def test_a_sample_was_trained_on_when_it_was_in_a_batch(lines: SmallRuns) -> None:
    run = lines.folder / "run"
    assert lines.train(1, **SMALL | {"steps": 7}) == [7]  # 56 samples
    checkpoint = latest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    assert read_state(checkpoint)["digest"]["step"] == 7
    for until in (7, 4, 2):
        whole = 0
        for number in range(SAMPLES):
            code, said = audit(run, "--sample", f"0:{number}", "--until", until, "--json")
            (found,) = json.loads(said)
            assert code == 0 and all(one["micro_batch"] < 4 * until for one in found["appearances"])
            whole += found["times"]
        assert whole == 8 * until
    code, said = audit(run, "--key", "nobody")
    assert code == 1 and "no data set of the run has a sample with this key" in said
