"""Bytes and sources of lazy values before they are read, for hooks that leave out files that are too large."""

from __future__ import annotations

import importlib
import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest

from energon_lite.extras.media import FileStoreCachePool
from energon_lite.storage.stores import NoCachePool
from tests.extras.media.stores.numbered_store import NumberedStore, source_of

pytest.importorskip("megatron.energon")

#: Bytes above which the hook leaves a file out.
LIMIT = 500


def library(name: str) -> Any:
    if name == "energon_lite":
        return importlib.import_module("energon_lite.extras.energon")
    stores = importlib.import_module("megatron.energon.cache.file_store")
    found = importlib.import_module("megatron.energon")
    found.WebdatasetFileStore, found.JsonlFileStore = stores.WebdatasetFileStore, stores.JsonlFileStore
    return found


def path_of(lib: Any, path: Path) -> Any:
    return (
        path
        if lib.__name__ == "energon_lite.extras.energon"
        else importlib.import_module("megatron.energon.epathlib").EPath(path)
    )


@pytest.fixture
def root(tmp_path: Path, tools: Any) -> Path:
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "s.tar", "w") as tar:
        for number in range(8):
            tools.add(tar, f"{number}.bin", bytes(100 * (number + 1)))
            tools.add(tar, f"{number}.txt", f"text {number}".encode())
    tools.energon_prepare(tmp_path / "data", "--split-ratio", "1,0,0")
    crude = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    tools.write_meta(tmp_path / "data", "dataset.yaml", crude)
    (tmp_path / "lines.jsonl").write_text('{"a": 1}\n{"b": 22}\n')
    tools.energon_prepare(tmp_path / "lines.jsonl")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_bytes(b"1234567")
    return tmp_path


def stores(lib: Any, root: Path) -> dict[str, tuple[Any, str]]:
    data = lib.WebdatasetFileStore(path_of(lib, root / "data"))
    return {
        "data set": (data, "5.bin"),
        "decoded": (lib.DecodeFileStore(data, decoder=lib.SampleDecoder()), "5.txt"),
        "folder": (lib.SystemFileStore(path_of(lib, root / "files")), "a.txt"),
        "lines": (lib.JsonlFileStore(path_of(lib, root / "lines.jsonl")), "1.json"),
        "own parts": (lib.PrimaryFileStore(data, "5"), "5.bin"),
    }


def facts(lib: Any, entry: Any) -> tuple[int, Any]:
    source = entry.source_info
    return entry.data_size, (source.index, source.shard_name, source.file_names, str(source.dataset_path))


@pytest.mark.parametrize("case", ["data set", "decoded", "folder", "lines", "own parts"])
def test_they_are_those_of_energon_once_it_has_read_them(root: Path, case: str) -> None:
    lib = library("energon")
    pool = lib.FileStoreCachePool(parent_cache_dir=root / "theirs")
    theirs = pool.get_lazy(*stores(lib, root)[case])
    theirs.entry.send_to_cache_future.result(10)
    wanted = facts(lib, theirs.entry)
    if case == "lines":
        wanted = (wanted[0] - 1, wanted[1])  # there the end of the line counts
    pool.close()
    ours = library("energon_lite")
    for method in ("raw", "pickle"):
        cache = FileStoreCachePool(parent_cache_dir=root / "ours", method=method, num_workers=1)  # type: ignore[arg-type]
        for one in (cache, NoCachePool()):
            lazy = one.get_lazy(*stores(ours, root)[case])
            assert facts(ours, lazy.entry) == wanted  # type: ignore[attr-defined]
            lazy.get()
            assert facts(ours, lazy.entry) == wanted  # type: ignore[attr-defined]
        cache.close()


def test_a_part_of_the_sample_itself_and_a_copy_in_another_process(root: Path) -> None:
    lib = library("energon_lite")
    store = lib.PrimaryFileStore(lib.WebdatasetFileStore(root / "data"), "5")
    pool = FileStoreCachePool(parent_cache_dir=root / "cache")
    lazy: Any = pool.get_lazy(store, ".bin")
    assert lazy.entry.data_size == pickle.loads(pickle.dumps(lazy)).entry.data_size == len(lazy.get()) == 600
    pool.close()


def test_no_payload_is_read_for_them(root: Path) -> None:
    lib = library("energon_lite")
    lazies: list[Any] = [NoCachePool().get_lazy(*one) for one in stores(lib, root).values()]
    (root / "data" / "s.tar").unlink()
    (root / "lines.jsonl").unlink()
    assert [lazy.entry.data_size for lazy in lazies] == [600, 6, 7, 9, 600]


def test_a_store_that_only_reads_is_read(tmp_path: Path) -> None:
    pool = FileStoreCachePool(parent_cache_dir=tmp_path)
    lazy: Any = pool.get_lazy(NumberedStore(), "a-100")
    assert (lazy.entry.data_size, lazy.entry.source_info) == (100, source_of("a-100"))
    pool.close()


def kept(lib: Any, root: Path, pool: Any, wait: bool) -> list[str]:
    """The samples that a hook keeps, by the size of a file that is to be read later."""

    @lib.edataclass
    class Film(lib.Sample):  # type: ignore[misc, name-defined]
        film: Any

    @lib.stateless
    @lib.cooker(need_cache=True, need_primary=True)
    def cook(sample: dict[str, Any], cache: Any, primary: Any) -> Film:
        return Film(**lib.basic_sample_keys(sample), film=cache.get_lazy(primary, f"{sample['__key__']}.bin"))

    class Guarded(lib.DefaultTaskEncoder):  # type: ignore[misc, name-defined]
        cookers = [lib.Cooker(cook)]

        @lib.stateless
        def encode_sample(self, sample: Film) -> Film:
            if wait:
                sample.film.entry.send_to_cache_future.result(10)
            if sample.film.entry.data_size > LIMIT:
                raise lib.SkipSample
            sample.film = sample.film.get(sample)
            return sample

    dataset = lib.get_val_dataset(
        str(root / "data"),
        split_part="train",
        batch_size=None,
        worker_config=lib.WorkerConfig(rank=0, world_size=1, num_workers=0),
        task_encoder=Guarded(),
    )
    return [sample.__key__ for sample in lib.get_savable_loader(dataset, cache_pool=pool) if sample is not None]


def test_a_guard_against_large_files_fires(root: Path) -> None:
    lib = library("energon")
    theirs = kept(lib, root, lib.FileStoreCachePool(parent_cache_dir=root / "theirs"), wait=True)
    pools = [NoCachePool(), *(FileStoreCachePool(parent_cache_dir=root / "ours", num_workers=n) for n in (1, 8))]
    assert [kept(library("energon_lite"), root, pool, wait=False) for pool in pools] == [theirs] * 3
    assert len(theirs) == 5
