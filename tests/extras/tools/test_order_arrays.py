"""Arrays on disk: exact counts, streams in order, the same bytes whoever writes them, whole or not there."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import UsageError, WorkerError
from energon_lite.extras.tools import order_arrays as arrays
from energon_lite.extras.tools.order_arrays import build_blend_index, shuffle_ahead
from energon_lite.order.block_counts import BLOCK
from energon_lite.order.permutation import permute_array
from tests.accidents import killed_at_every_step
from tests.testing import contents_of

weights_lists = st.lists(st.one_of(st.floats(1e-9, 1.0), st.integers(1, 5)), min_size=1, max_size=12)
N = 10 * BLOCK + 321


def _largest_remainder(weights: list[float], n: int) -> list[int]:
    total = sum(map(Fraction, weights))
    ideal = [Fraction(weight) * n / total for weight in weights]
    counts = [int(share) for share in ideal]
    by_rest = sorted(range(len(weights)), key=lambda leaf: (counts[leaf] - ideal[leaf], leaf))
    for leaf in by_rest[: n - sum(counts)]:
        counts[leaf] += 1
    return counts


@given(weights=weights_lists, n=st.integers(1, 3 * BLOCK), key=st.integers(0, 2**64 - 1))
def test_exact_counts_and_streams_in_order(weights: list[float], n: int, key: int) -> None:
    data_set, sample = build_blend_index(weights, n, key=key)
    assert (data_set.dtype, sample.dtype, len(data_set), len(sample)) == (np.int16, np.int64, n, n)
    counts = _largest_remainder(weights, n)
    for leaf, count in enumerate(counts):
        assert np.array_equal(sample[data_set == leaf], np.arange(count))


@given(weights=weights_lists)
def test_shares_hold_at_block_ends(weights: list[float]) -> None:
    data_set, _ = build_blend_index(weights, N)
    final = np.array(_largest_remainder(weights, N))
    for end in range(BLOCK, N, BLOCK):
        counts = np.bincount(data_set[:end], minlength=len(weights))
        assert np.abs(counts - final * end / N).max() <= 1


def test_files_hold_what_memory_holds(tmp_path: Path) -> None:
    built = build_blend_index([5, 3, 1e-3], N, tmp_path / "index", key=3)
    for column, expected in zip(built, build_blend_index([5, 3, 1e-3], N, key=3), strict=True):
        assert isinstance(column, np.memmap) and not column.flags.writeable
        assert np.array_equal(column, expected)
    assert sorted(contents_of(tmp_path / "index")) == ["dataset_index.npy", "dataset_sample_index.npy"]
    assert os.listdir(tmp_path) == ["index"]


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    build_blend_index([2, 1, 0.1], N, tmp_path / "one", workers=1)
    monkeypatch.setattr(arrays, "_WORTH_A_PROCESS", 1)
    build_blend_index([2, 1, 0.1], N, tmp_path / "many", workers=workers)
    assert contents_of(tmp_path / "one") == contents_of(tmp_path / "many")


@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    """Also more ranks than blocks. Threads stand for ranks here."""
    build_blend_index([2, 1, 0.1], N, tmp_path / "one", workers=1)
    together: dict[str, Any] = {"world_size": ranks, "barrier": threading.Barrier(ranks, timeout=120).wait}
    with ThreadPoolExecutor(ranks) as pool:
        for rank in range(ranks):
            pool.submit(build_blend_index, [2, 1, 0.1], N, tmp_path / "many", workers=1, rank=rank, **together)
    assert contents_of(tmp_path / "one") == contents_of(tmp_path / "many")


@pytest.mark.usefixtures("quick_disk")
def test_killed_at_every_step_the_next_build_is_whole(tmp_path: Path) -> None:
    build_blend_index([3, 1], N, tmp_path / "undisturbed", workers=1)
    folder = tmp_path / "x"

    def build() -> None:
        build_blend_index([3, 1], N, folder, workers=1)

    kills = 0
    for killed in killed_at_every_step(build, lambda: shutil.rmtree(folder, ignore_errors=True)):
        kills += killed
        if not folder.exists():
            build()
        assert contents_of(folder) == contents_of(tmp_path / "undisturbed")
        assert sorted(os.listdir(tmp_path)) == ["undisturbed", "x"]
    assert kills > 3


def test_a_process_whose_parent_is_gone_before_it_starts_writes_nothing(tmp_path: Path) -> None:
    """It must not write into the files of the next build of the same name."""
    build_blend_index([3, 1], N, tmp_path / "x", workers=1)
    before = contents_of(tmp_path / "x")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    paths = [str(tmp_path / "x" / name) for name in (arrays.DATASET_INDEX, arrays.SAMPLE_INDEX)]
    files = [(os.open(path, os.O_RDWR), 128) for path in paths]
    job = {"files": files, "recipe": {"counts": [N, N], "key": 0}, "first": 0, "stop": 1}
    child = subprocess.run(
        [sys.executable, "-c", "from energon_lite.extras.tools.order_arrays import serve; serve()"],
        input=pickle.dumps({"parent": gone.pid, **job}),
        cwd=Path(arrays.__file__).parents[2],
        pass_fds=[file for file, _ in files],
        capture_output=True,
        check=False,
    )
    for file, _ in files:
        os.close(file)
    assert child.returncode and b"the process that requested this has ended" in child.stderr
    assert contents_of(tmp_path / "x") == before


def test_a_process_that_fails_is_reported(tmp_path: Path) -> None:
    build_blend_index([1], 1, tmp_path / "x")
    with pytest.raises(RuntimeError, match="KeyError"):
        arrays._fill_in_children([str(tmp_path / "x" / arrays.SAMPLE_INDEX)], {"counts": [1]}, 0, 1, 1)


def test_impossible_indexes_are_refused(tmp_path: Path) -> None:
    for call, words in (
        (lambda: build_blend_index([1] * 32_768, 10), "32768 data sets"),
        (lambda: build_blend_index([1], 0), "index of 0 samples"),
        (lambda: build_blend_index([1, -1], 10), "weight 1 of a blend is -1"),
        (lambda: build_blend_index([1], 10, tmp_path), "path exists already"),
        (lambda: build_blend_index([1], 10, tmp_path / "x", world_size=2), "without a barrier"),
        (lambda: build_blend_index([1], 10, tmp_path / "x", rank=1), "rank 1 of 1"),
        (lambda: shuffle_ahead(0, 1), "0 elements"),
    ):
        with pytest.raises(UsageError, match=words) as caught:
            call()
        assert caught.value.fix
    assert os.listdir(tmp_path) == []


def test_as_many_data_sets_as_the_numbers_allow() -> None:
    data_set, sample = build_blend_index([1] * 32_767, 32_767)
    assert np.array_equal(np.sort(data_set), np.arange(32_767)) and not sample.any()


@pytest.mark.parametrize(("n", "workers"), [(1, 1), (1000, 1), (100_003, 2)])
def test_shuffled_ahead(tmp_path: Path, n: int, workers: int) -> None:
    opened = len(os.listdir("/dev/fd"))
    order = shuffle_ahead(n, 2**64 - 5, folder=tmp_path, workers=workers).result(timeout=60)
    assert len(os.listdir("/dev/fd")) - opened <= 1  # the mapping has one
    assert np.array_equal(order, permute_array(np.arange(n), n, 2**64 - 5))
    assert os.listdir(tmp_path) == []


def test_a_shuffle_that_fails_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        shuffle_ahead(10, 1, folder=tmp_path / "nowhere").result(timeout=60)


def test_golden() -> None:
    """Values for ever. If this changes, so must ORDER_VERSION."""
    columns = build_blend_index(np.array([5, 3, 1e-3]), N, key=42)
    digest = hashlib.sha256(np.stack(columns).astype("<i8").tobytes()).hexdigest()[:16]
    assert digest == "279a71140fcad359"


def test_what_a_child_says_that_cannot_begin_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends before it has read its job, which is larger than a pipe."""
    monkeypatch.setattr(arrays, "_BOOT", "raise SystemExit('no room')")
    with pytest.raises(WorkerError, match="no room"):
        arrays._fill_in_children([], {"large": "x" * 1_000_000}, 0, 2, 2)
