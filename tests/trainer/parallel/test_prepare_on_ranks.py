"""Several ranks prepare one data set together, in a group and without one, or write one blend index."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from energon_lite.errors import DatasetError, UsageError
from energon_lite.extras.tools.order_arrays import build_blend_index
from energon_lite.storage.prepare import PrepareReport, prepare_dataset
from energon_lite.storage.sharded_job import Ranks
from tests.testing import write_tar
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks

OPTIONS = {"split_ratio": "3,1,1", "sample_type": "TextSample", "field_map": {"text": "txt"}, "workers": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eleven shards with 1 .. 11 samples."""
    for shard in range(11):
        samples = [(f"{shard}-{number}", {"txt": b"x" * number}) for number in range(shard + 1)]
        write_tar(tmp_path / f"data/{shard:02d}.tar", samples)
    return tmp_path / "data"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".tar"
    }


def prepare(folder: Path, ranks: Ranks | None = None) -> PrepareReport:
    return prepare_dataset(folder, ranks=ranks, force_overwrite=True, **OPTIONS)  # type: ignore[arg-type]


def expected(folder: Path) -> dict[str, bytes]:
    """What one process writes; the folder is as before."""
    prepare(folder)
    found = contents(folder)
    for name in found:
        (folder / name).unlink()
    shutil.rmtree(folder / ".nv-meta")
    assert len(found) == 11 + 6
    return found


def test_four_ranks_write_what_one_writes(run_ranks: RunRanks, folder: Path) -> None:
    alone = expected(folder)

    def job(rank: int) -> tuple[int, int, bool]:
        report = prepare(folder, Ranks(rank, 4))
        return report.shards, report.samples, (folder / ".nv-meta/.info.json").exists()

    results = run_ranks(4, job)
    assert results == [(11, 66, True), (3, 2 + 6 + 10, True), (3, 3 + 7 + 11, True), (2, 4 + 8, True)]
    assert contents(folder) == alone


def test_a_broken_shard_ends_all_ranks(run_ranks: RunRanks, folder: Path) -> None:
    os.truncate(folder / "06.tar", 700)
    with pytest.raises(RankFailure) as failed:
        run_ranks(3, lambda rank: prepare(folder, Ranks(rank, 3)))
    texts = failed.value.by_rank
    assert "ShardFormatError" in texts[0] and "truncated" in texts[0] and "06.tar" in texts[0]
    for rank in (1, 2):
        assert "rank 0 could not do its part" in texts[rank] and "truncated" in texts[rank]
    assert not (folder / ".nv-meta/.info.json").exists()


def test_a_mistake_of_rank_0_ends_all_ranks(run_ranks: RunRanks, folder: Path) -> None:
    prepare(folder)
    with pytest.raises(RankFailure) as failed:
        run_ranks(2, lambda rank: prepare_dataset(folder, split_ratio="1,0,0", ranks=Ranks(rank, 2)))
    assert "already been prepared" in failed.value.by_rank[0] and "already been prepared" in failed.value.by_rank[1]


def test_without_a_group_the_others_may_come_first(folder: Path) -> None:
    alone = expected(folder)
    for rank in (1, 0):
        prepare(folder, Ranks(rank, 2, timeout=0))
    assert contents(folder) == alone
    prepare(folder, Ranks(1, 2))  # and a late one does no harm
    assert contents(folder) == alone


def test_a_broken_shard_of_another_rank_counts_until_it_is_mended(folder: Path) -> None:
    whole = (folder / "05.tar").read_bytes()
    os.truncate(folder / "05.tar", 700)
    share = prepare(folder, Ranks(1, 2))
    assert share.shards == 4 and "05.tar: the tar file is truncated" in share.warnings[0]
    with pytest.raises(DatasetError, match=r"truncated[\s\S]*05\.tar"):
        prepare(folder, Ranks(0, 2, timeout=5))
    (folder / "05.tar").write_bytes(whole)
    with pytest.raises(DatasetError, match=r"no result for 1 of 11 shards[\s\S]*rank 1: 05\.tar"):
        prepare(folder, Ranks(0, 2, timeout=0.2))


def test_who_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ranks.from_environment() == Ranks(0, 1)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    assert Ranks.from_environment() == Ranks(3, 8)
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(UsageError, match="RANK='x'"):
        Ranks.from_environment()
    with pytest.raises(UsageError, match="rank 2 of 2"):
        Ranks(2, 2)
    shares = [Ranks(rank, 3).share(range(10)) for rank in range(3)]
    assert sorted(item for share in shares for item in share) == list(range(10))
    assert max(map(len, shares)) - min(map(len, shares)) == 1


WEIGHTS, N = [2, 1, 0.1, 3e-5], 100_001


def test_four_ranks_write_a_blend_index_of_the_same_bytes(run_ranks: RunRanks, tmp_path: Path) -> None:
    alone = build_blend_index(WEIGHTS, N, tmp_path / "alone", key=5)

    def build(rank: int) -> list[int]:
        columns = build_blend_index(WEIGHTS, N, tmp_path / "together", key=5, workers=1)
        assert dist.get_world_size() == 4
        assert all(np.array_equal(column, expected) for column, expected in zip(columns, alone, strict=True))
        return [len(column) for column in columns]

    assert run_ranks(4, build) == [[N, N]] * 4
    for file in (tmp_path / "alone").iterdir():
        assert file.read_bytes() == (tmp_path / "together" / file.name).read_bytes()
    assert {file.name for file in tmp_path.iterdir() if not file.name.startswith("ranks-")} == {"alone", "together"}
