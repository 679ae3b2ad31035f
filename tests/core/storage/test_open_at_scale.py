"""Opening and reading large data sets: what must not grow with their size."""

from __future__ import annotations

import builtins
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite import get_savable_loader, get_train_dataset
from energon_lite.errors import MissingShardError
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.prepare import prepare_dataset
from energon_lite.storage.tar_scan import ShardScan
from tests.core.storage.memory_work import look_up
from tests.private_memory import private_growth
from tests.testing import ALONE, in_time

SCRIPT = Path(__file__).parents[3] / "tools/bench/open_at_scale.py"


def opened_until_the_first_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are opened, in order."""
    names: list[str] = []

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(path: Any, *arguments: Any, **options: Any) -> Any:
            if str(path).startswith(str(folder)):
                names.append(Path(str(path)).name)
            return function(path, *arguments, **options)

        return recorded

    stats = 0

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(path: Any, *arguments: Any, **options: Any) -> Any:
            nonlocal stats
            stats += str(path).endswith(".tar")
            return function(path, *arguments, **options)

        return counted

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", counting(os.stat))
        patch.setattr(builtins, "open", recording(builtins.open))
        patch.setattr(os, "open", recording(os.open))
        dataset = get_train_dataset(
            folder, batch_size=1, shuffle_buffer_size=None, max_samples_per_sequence=None, worker_config=ALONE
        )
        with get_savable_loader(dataset) as loader:
            next(iter(loader))
    assert stats <= 1000
    return names


def test_opening_touches_few_shards_of_two_thousand(
    make_tar: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    opened = {}
    for shards in (5, 2000):
        folder = tmp_path / f"d{shards}"
        whole = make_tar("one.tar", [("0.txt", b"text")]).read_bytes()[:2048]
        folder.mkdir()
        for shard in range(shards):
            (folder / f"{shard:04d}.tar").write_bytes(whole)
        prepare_dataset(
            folder,
            split_parts={"train": ".*"},
            sample_type="TextSample",
            field_map={"text": "txt"},
            sqlite=False,
            workers=1,
        )
        opened[shards] = opened_until_the_first_batch(folder, monkeypatch)
    shards_read = [name for name in opened[2000] if name.endswith(".tar")]
    assert len(shards_read) <= 9  # one for the batch, and eight that tell the data set from others
    # Everything else is opened as often as for a small data set, whose index is read at once.
    few, many = (sorted(name for name in opened[shards] if not name.endswith(".tar")) for shards in (5, 2000))
    assert sorted([*few, "energon_lite.idx"]) == many and ".info.json" in few and "energon_lite.idx" in few
    # One whose size is not looked at.
    (folder / "0333.tar").unlink()
    with pytest.raises(MissingShardError, match=r"0333\.tar"):
        opened_until_the_first_batch(folder, monkeypatch)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux")
def test_look_ups_in_a_large_index_cost_little_memory(tmp_path: Path) -> None:
    samples = 200_000
    numbers = np.arange(samples, dtype=np.int64)
    keys = [f"{number:08d}".encode() for number in range(samples)]
    scan = ShardScan(
        name="a.tar",
        size=1,
        head=2,
        end=3,
        headers=1024 * numbers,
        first_part=np.arange(samples + 1),
        parts=np.stack([1024 * numbers + 512, numbers % 512, 0 * numbers], 1),
        part_names=("txt",),
        key_offsets=8 * np.arange(samples + 1),
        keys=b"".join(keys),
    )
    path = str(tmp_path / "i.idx")
    PackedIndex.from_scans([scan]).write(path)
    grown = [private_growth(look_up, path, samples, mapped, workers=1)[0] for mapped in (False, True)]
    print(f"\n{grown[0] / 2**20:.1f} MiB, mapped {grown[1] / 2**20:.1f} MiB")
    # The blocks that a process keeps, 4 MiB; and, to show that the measurement sees pages, what mapping would cost.
    assert grown[0] < 6 << 20 and grown[1] - grown[0] > os.path.getsize(path) // 2


def measured(*options: str) -> dict[str, float]:
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", *options], capture_output=True, text=True, env=environment, check=False
    )
    assert not done.returncode, done.stderr
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.nightly
def test_the_marks_at_full_size() -> None:
    """10,000 shards, an index of 10**8 samples, an epoch of 10**6; 8 GB of disk."""
    found = measured("--full", "--only", "shards", "--only", "index", "--only", "workers")
    assert found["first batch"] <= 2 and found["opened"] <= 0.5
    assert found["private memory per worker"] <= 50 and found["growth per worker"] < 20


@pytest.mark.nightly
def test_the_marks_of_ten_thousand_data_sets() -> None:
    found = measured("--only", "leaves")
    assert found["processor, leaves"] <= 5 and found["samples beside share"] <= 1
    assert found["memory, leaves"] <= 64 and found["memory per worker, leaves"] <= 64


def test_a_look_up_that_fails_ends_the_measuring(ten: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process has no result to give, and the others' do not stand for it."""
    prepare_dataset(ten, split_ratio="1,0,0", crude=True)  # its keys are not those of the benchmark
    monkeypatch.syspath_prepend(SCRIPT.parent)
    measure = importlib.import_module("open_at_scale").measure_index
    with pytest.raises(SystemExit, match="look-up"):
        in_time(lambda: measure(str(ten / ".nv-meta/energon_lite.idx")))
