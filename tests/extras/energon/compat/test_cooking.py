"""Cookers with stores, their own data set and a cache, written once, and run by both libraries."""

from __future__ import annotations

import importlib
import itertools
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.extras.media.stores.numbered_store import NumberedStore, source_of
from tests.testing import take, write_tar

pytest.importorskip("megatron.energon")

COUNT = 6
V2 = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}


def library(name: str) -> Any:
    """The names that a user imports."""
    if name != "energon":
        return importlib.import_module("energon_lite.extras.energon")
    modules = ("megatron.energon", "megatron.energon.cache.file_store", "megatron.energon.errors")
    found = [vars(importlib.import_module(module)) for module in modules]
    return SimpleNamespace(**{one: value for names in found for one, value in names.items() if one[:2] != "__"})


def encoder_of(lib: Any) -> Any:
    """A task encoder whose cooker takes everything there is; lazy values are asked for behind packing."""

    @lib.edataclass
    class Lazy(lib.Sample):  # type: ignore[misc]
        text: str
        picture: Any
        next_text: Any
        aside: Any

    @lib.stateless
    @lib.cooker(need_cache=True, need_primary=True)
    def cook(sample: dict[str, Any], primary: Any, pictures: Any, notes: Any, cache: Any) -> Any:
        number = sample["json"]["n"]
        note = notes.get(f"{number}.txt", sample)
        return Lazy(
            **lib.basic_sample_keys(sample),
            text=f"{primary.get('.txt')}|{note}|{pictures.get(f'deep/{number}.cls', sample)}",
            picture=cache.get_lazy(pictures, f"deep/{number}.png"),
            next_text=cache.get_lazy(primary, f"{(number + 1) % COUNT:03d}.txt"),
            aside=cache.to_cache(sample["json"], sample["__key__"]),
        )

    class Encoder(lib.DefaultTaskEncoder):  # type: ignore[misc]
        cookers = [lib.Cooker(cook, has_subflavors={"kind": "all"})]

        @lib.stateless
        def postencode_sample(self, sample: Any) -> Any:
            sample.picture = sample.picture.get(sample)
            sample.aside = sample.aside.get(sample)
            return sample

        def select_samples_to_pack(self, samples: Sequence[Any]) -> list[Any]:
            return [[sample] for sample in samples]

        @lib.stateless
        def pack_selected_samples(self, samples: Sequence[Any]) -> Any:
            (sample,) = samples
            sample.next_text = sample.next_text.get(sample)
            return sample

    return Encoder()


@pytest.fixture
def blend(tmp_path: Path, tools: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    data = {
        "own": lambda n: (f"{n:03d}", {"json": json.dumps({"n": n}).encode(), "txt": f"text {n}".encode()}),
        "pictures": lambda n: (f"deep/{n}", {"png": tools.image_bytes(n, "png"), "cls": b"%d" % n}),
    }
    for name, sample in data.items():
        for shard in range(2):
            numbers = range(shard * COUNT // 2, (shard + 1) * COUNT // 2)
            write_tar(tmp_path / name / f"{shard}.tar", [sample(number) for number in numbers])
        tools.energon_prepare(tmp_path / name, "--split-ratio", "0,1,0")
        tools.write_meta(tmp_path / name, "dataset.yaml", V2 | {"__class__": "CrudeWebdataset"})
    (tmp_path / "notes").mkdir()
    for number in range(COUNT):
        (tmp_path / f"notes/{number}.txt").write_text(f"note {number}")
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(COUNT)))
    tools.lite_prepare(tmp_path / "lines.jsonl")
    aux = {"pictures": "./pictures", "notes": "filesystem://./notes"}
    reference = {"path": "own", "split_part": "val", "aux": aux, "subflavors": {"kind": "all"}}
    path = tmp_path / "blend.yaml"
    path.write_text(yaml.safe_dump(V2 | {"splits": {"val": reference}}))
    return path


@pytest.mark.parametrize("pool", ["none", "raw", "pickle"])
def test_cooked_samples_are_the_same(blend: Path, tools: Any, pool: Any) -> None:
    assert_same, ours, theirs = tools.assert_same, [], []
    for name, found in (("energon", theirs), ("energon_lite", ours)):
        lib = library(name)
        config = lib.WorkerConfig(rank=0, world_size=1, num_workers=0)
        options = {"batch_size": None, "packing_buffer_size": 4, "task_encoder": encoder_of(lib)}
        dataset = lib.get_val_dataset(str(blend), split_part="val", worker_config=config, **options)
        cache = lib.NoCachePool()
        if pool != "none":
            cache = lib.FileStoreCachePool(parent_cache_dir=blend.parent / "local" / name, num_workers=2, method=pool)
        found += [tools.plain(sample) for sample in lib.get_savable_loader(dataset, cache_pool=cache)]
        cache.close()
    assert len(ours) == COUNT
    ours.sort(key=lambda sample: str(sample["__key__"]))  # chunks of samples to be packed come one by one
    assert_same(ours, theirs)
    assert [len(sample["__sources__"]) for sample in ours] == [4] * COUNT


#: What is stored, the store of it, and keys in it.
STORES = {
    "own": ("WebdatasetFileStore", ["000.txt", "005.json"]),
    "pictures": ("WebdatasetFileStore", ["deep/3.png", "deep/5.cls"]),
    "notes": ("SystemFileStore", ["0.txt", "3.txt"]),
    "lines.jsonl": ("JsonlFileStore", ["0.json", "5.json"]),
}


def path_of(lib: Any, path: Path) -> Any:
    if hasattr(lib, "__path__"):
        return path
    return importlib.import_module("megatron.energon.epathlib").EPath(path)


def size_and_source(lazy: Any) -> tuple[int, Any]:
    source = lazy.entry.source_info
    return lazy.entry.data_size, (source.index, source.shard_name, source.file_names, str(source.dataset_path))


@pytest.mark.parametrize("case", STORES)
def test_stores_give_the_same(blend: Path, tools: Any, case: str) -> None:
    """Values, their sources, and both beside a lazy value: here before it is read."""
    kind, keys = STORES[case]
    found = []
    for name in ("energon", "energon_lite"):
        lib = library(name)
        raw = getattr(lib, kind)(path_of(lib, blend.parent / case))
        decoded = lib.DecodeFileStore(raw, decoder=lib.SampleDecoder())
        primary = lib.PrimaryFileStore(decoded, keys[0].rpartition(".")[0])
        sample: dict[str, Any] = {}
        values = [store.get(key, sample) for store in (raw, decoded, primary) for key in keys]
        values += [primary.get("." + keys[0].rpartition(".")[2], sample)]
        sources = [(one.index, one.shard_name, one.file_names, str(one.dataset_path)) for one in sample["__sources__"]]
        facts = set()
        ways: Any = itertools.product((raw, decoded), ("raw", "pickle"))  # there others have other sizes
        for place, (store, method) in enumerate([(raw, "raw")] if name == "energon" else ways):
            pool = lib.FileStoreCachePool(parent_cache_dir=blend.parent / name / str(place), method=method)
            lazy = pool.get_lazy(store, keys[1])
            if name == "energon":
                lazy.entry.send_to_cache_future.result(10)
            facts.add(size_and_source(lazy))
            pool.close()
        if name == "energon" and case == "lines.jsonl":  # there the end of the line counts
            facts = {(size - 1, source) for size, source in facts}
        found.append((values, sources, str(raw.get_path()), facts))
        for missing in ("no.txt", "77.json"):
            with pytest.raises((KeyError, FileNotFoundError, ValueError, IndexError, UnboundLocalError)):
                raw.get(missing)
    (theirs, *more), (ours, *own) = found
    assert own == more
    for one, other in zip(ours, theirs, strict=True):
        assert one.rstrip() == other.rstrip() if isinstance(one, bytes) else tools.equal(one, other)


@pytest.mark.parametrize(
    ("hook", "tolerance", "every"),
    [("encode_sample", 1, 0), ("encode_sample", 3, 3), ("encode_sample", 3, 4), ("batch", 5, 0)],
)
def test_failures_are_tolerated_as_often(blend: Path, hook: str, tolerance: int, every: int) -> None:
    found = []
    for name in ("energon", "energon_lite"):
        lib = library(name)
        calls, handled = [], []
        ended = run_failing(lib, blend.parent / "own", hook, tolerance, every, calls, handled)
        found.append((ended, len(calls), handled))
    assert found[0] == found[1] and found[0][0] == (every != 3)


def run_failing(
    lib: Any, path: Path, hook: str, tolerance: int, every: int, calls: list[int], handled: list[Any]
) -> bool:
    """Whether the run was ended by a hook that succeeds every so many calls only."""

    @lib.stateless
    @lib.cooker
    def cook(sample: dict[str, Any]) -> Any:
        return lib.TextSample(**lib.basic_sample_keys(sample), text=sample["txt"])

    @lib.stateless(failure_tolerance=tolerance)
    def fails(self: Any, given: Any) -> Any:
        calls.append(1)
        if not every or len(calls) % every:
            raise ValueError("bad")
        return given

    def handler(error: Exception, given: Any, sources: Any) -> None:
        handled.append((type(error).__name__, type(given).__name__, type(sources).__name__))

    fails.__name__ = hook
    encoder = type("Encoder", (lib.DefaultTaskEncoder,), {"cookers": [lib.Cooker(cook)], hook: fails})()
    config = lib.WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=handler)
    order = {"shuffle_buffer_size": None, "max_samples_per_sequence": None}
    options = {"split_part": "val", "batch_size": 2, "worker_config": config, "task_encoder": encoder}
    try:
        take(lib.get_savable_loader(lib.get_train_dataset(str(path), **options, **order)), 4)
    except lib.FatalSampleError:
        return True
    return False


def test_sizes_take_no_payload_and_travel(blend: Path, tmp_path: Path) -> None:
    lib = library("energon_lite")
    data = lib.WebdatasetFileStore(blend.parent / "own")
    stores = [(data, "001.txt"), (lib.PrimaryFileStore(data, "001"), ".txt"), (data, "005.json")]
    pool = lib.FileStoreCachePool(parent_cache_dir=tmp_path / "cache")
    own = pool.get_lazy(lib.PrimaryFileStore(data, "001"), ".txt")
    assert own.entry.data_size == pickle.loads(pickle.dumps(own)).entry.data_size == len(own.get()) == 6
    lazy = pool.get_lazy(NumberedStore(), "a-100")  # a store that only reads is read
    assert (lazy.entry.data_size, lazy.entry.source_info) == (100, source_of("a-100"))
    pool.close()
    lazies = [lib.NoCachePool().get_lazy(*one) for one in stores]
    for shard in (blend.parent / "own").glob("*.tar"):
        shard.unlink()
    assert [one.entry.data_size for one in lazies] == [6, 6, 8]
