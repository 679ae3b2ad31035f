"""Storage that fails under a running loader: a clear error or a counted skip, and never another order."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest

from energon_lite import TaskEncoder
from energon_lite.errors import FatalSampleError, ShardChangedError
from energon_lite.storage.files import stored_array
from energon_lite.storage.files.shard_store import shared_store
from energon_lite.storage.samples import part_decoder
from tests.servers import upload
from tests.testing import take, train_loader, val_loader


class Patient(TaskEncoder):
    failure_tolerance = 1000


def _copy(leaf: Path, folder: Path) -> Path:
    return Path(shutil.copytree(leaf, folder / "copy"))


def _train(path: Path | str, workers: int = 0, encoder: TaskEncoder | None = None) -> Any:
    return train_loader(path, workers, batch_size=3, task_encoder=encoder)


def _keys(loader: Any, count: int) -> list[tuple[str, ...]]:
    return [tuple(batch.__key__) for batch in take(loader, count)]


class Own(Patient):
    """Hooks of its own: batches are not made by columns."""

    def encode_sample(self, sample: Any) -> Any:
        return sample


@pytest.fixture(autouse=True)
def no_open_files() -> Any:
    """A deleted file stays readable for whoever has it open; here nobody has."""
    shared_store().close()
    yield
    shared_store().close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_vanishes_is_skipped_sample_by_sample_and_counted(
    workers: int, leaf_of: Any, tmp_path: Path
) -> None:
    expected = _keys(_train(leaf_of(30, "a")), 20)
    path = _copy(leaf_of(30, "a"), tmp_path)
    lost = {f"a-{number}" for number in range(10, 20)}
    with _train(path, workers, Patient()) as loader:
        (path / "shard-001.tar").unlink()
        seen = _keys(loader, 20)
        stats = loader.stats()
    assert not lost & {key for keys in seen for key in keys}
    for keys, wanted in zip(seen, expected, strict=True):
        assert len(keys) == 3
        assert all(key == old for key, old in zip(keys, wanted, strict=True) if old not in lost), "others moved"
    assert "the shard does not exist any more" in str(stats)


def test_a_shard_that_vanishes_ends_a_run_that_tolerates_little(leaf_of: Any, tmp_path: Path) -> None:
    path = _copy(leaf_of(30, "a"), tmp_path)
    loader = _train(path)
    for shard in path.glob("*.tar"):
        shard.unlink()
    with loader, pytest.raises(FatalSampleError, match="the shard does not exist any more") as failure:
        next(iter(loader))
    assert "energon-lite prepare" in str(failure.value)


def test_a_shard_that_vanishes_leaves_places_empty_in_validation(leaf_of: Any, tmp_path: Path) -> None:
    path = _copy(leaf_of(30, "a"), tmp_path)
    loader = val_loader(path, batch_size=3)
    (path / "shard-001.tar").unlink()
    keys = [key for batch in loader for key in batch.__key__]
    assert keys == [f"a-{number}" for number in (*range(10), *range(20, 30))]
    assert loader.stats()["failed"] == 10


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_read_that_fails_names_the_shard_and_the_reason(
    error: int, leaf_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pread(*_: Any) -> bytes:
        raise OSError(error, os.strerror(error))

    with _train(leaf_of(30, "a")) as loader:
        monkeypatch.setattr(os, "pread", pread)
        with pytest.raises(FatalSampleError, match=os.strerror(error)):
            next(iter(loader))


@pytest.mark.parametrize("columns", [True, False])
def test_storage_that_fails_for_a_moment_changes_nothing(
    columns: bool, leaf_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = TaskEncoder() if columns else Own()
    expected = _keys(_train(leaf_of(30, "a"), 0, encoder), 12)
    shared_store().close()
    calls = itertools.count()
    pread = os.pread

    def flaky(*arguments: Any) -> bytes:
        if next(calls) % 7 == 3:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return pread(*arguments)

    monkeypatch.setattr(os, "pread", flaky)
    with _train(leaf_of(30, "a"), 0, encoder) as loader:
        assert _keys(loader, 12) == expected
        assert loader.stats()["failed"] == 0
    assert next(calls) > 20


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_is_cut_off_while_it_is_read_ends_the_run(workers: int, leaf_of: Any, tmp_path: Path) -> None:
    expected = _keys(_train(leaf_of(30, "a")), 20)
    path = _copy(leaf_of(30, "a"), tmp_path)
    seen = []
    with _train(path, workers, Patient()) as loader:
        with pytest.raises(ShardChangedError, match=r"1024 bytes instead of 20480[\s\S]*shard-001\.tar[\s\S]*prepare"):
            for step, batch in zip(range(20), loader, strict=False):
                seen.append(tuple(batch.__key__))
                if step == 2:
                    os.truncate(path / "shard-001.tar", 1024)  # within its first sample
        failed = loader.stats()["failed"]
    assert seen == expected[: len(seen)] and not failed


def test_an_object_that_was_cut_off_ends_the_run(leaf_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("energon_lite.extras.remote.store_tries._UNKNOWN", (0.0,))
    store = fsspec.filesystem("memory")
    with _train(upload(leaf_of(30, "a"), "cut"), 0, Patient()) as loader:
        batches = iter(loader)
        next(batches)
        store.pipe_file("/cut/shard-001.tar", store.cat_file("/cut/shard-001.tar")[:1024])
        with pytest.raises(ShardChangedError, match=r"1024 bytes instead of 20480[\s\S]*shard-001\.tar"):
            for _ in range(20):
                next(batches)
        assert not loader.stats()["failed"]
    store.rm("/cut", recursive=True)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("columns", [True, False])
def test_a_shortage_changes_nothing_or_ends_the_run(
    columns: bool, number: int, leaf_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = TaskEncoder() if columns else Own()
    expected = _keys(_train(leaf_of(30, "a"), 0, encoder), 12)
    monkeypatch.setattr("energon_lite.storage.files.retries._SHORT", (0.0, 0.01))
    real, left = os.open, [0]

    def short(path: Any, *arguments: Any, **options: Any) -> int:
        if left[0] and str(path).endswith(".tar"):
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", short)
    with _train(leaf_of(30, "a"), 0, encoder) as loader:
        batches = iter(loader)
        for keys in expected:
            left[0] = 2
            shared_store().close()
            assert tuple(next(batches).__key__) == keys
        assert loader.stats()["failed"] == 0
        left[0] = 10_000
        shared_store().close()
        with pytest.raises(FatalSampleError, match=r"ran out, for seconds[\s\S]*(raise the limit|use fewer workers)"):
            next(batches)
        assert left[0] > 9_900  # at the first sample, and not after many failed ones


def test_memory_that_runs_out_while_a_part_is_unpacked_ends_the_run(
    leaf_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unpack(data: bytes) -> Any:
        raise MemoryError

    with _train(leaf_of(30, "a"), 0, Patient()) as loader:
        for name in ("txt", "json", "cls"):
            monkeypatch.setitem(part_decoder._BY_EXTENSION, name, unpack)
        part_decoder.decoder_for.cache_clear()
        try:
            with pytest.raises(FatalSampleError, match="no memory was left in decode"):
                next(iter(loader))
        finally:
            part_decoder.decoder_for.cache_clear()


@pytest.mark.parametrize("damage", ["flip", "cut"])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_index_that_is_damaged_under_a_running_loader_ends_the_run(
    workers: int, damage: str, leaf_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_array, "_KEPT", 1)  # so that a small index is read again and again
    path = _copy(leaf_of(400, "a"), tmp_path)
    index = path / ".nv-meta/energon_lite.idx"
    with _train(path, workers, Patient()) as loader, pytest.raises(FatalSampleError, match="packed index"):
        for step, _ in zip(range(200), loader, strict=False):
            if step == 2:
                data = bytearray(index.read_bytes())
                data[len(data) // 3] ^= 4
                index.write_bytes(data if damage == "flip" else data[:9000])
