"""A blend of very many data sets: what one start finds out is the next one's to read, and nothing else differs."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite import get_savable_loader, get_train_dataset
from energon_lite.errors import ConfigError, DataIndexError, EnergonLiteError, UsageError
from energon_lite.extras.blends import blend_file, leaf_table, opening
from energon_lite.extras.blends.leaf_table import KnownLeaf, LeafTable
from energon_lite.extras.energon import BatchDataset, BlendDataset
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.storage.files.array_file import ArrayWriter
from energon_lite.storage.index.columns import write_column
from energon_lite.storage.read.ranges import ReadAhead
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.accidents import killed_at
from tests.testing import ALONE, alone, take

LEAVES = 80
OLD = 1_600_000_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, write_dataset: Callable[..., Path]) -> Path:
    """A prepared folder with a column of lengths."""
    samples = [(str(number), {"txt": b"x" * (number + 1)}) for number in range(4)]
    folder = write_dataset(tmp_path_factory.mktemp("one"), {"s0.tar": samples}, splits={"train": ["s0.tar"]})
    WebdatasetSource.open(folder)  # makes the index
    write_column(folder, "length", np.array([5, 1, 9, 2]))
    return folder


@pytest.fixture
def blend(tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A blend of links to the files of one folder; its files are old enough to be trusted."""
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(opening, "MANY", 10)
    monkeypatch.setattr(leaf_table, "KEPT", 16)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    files = [path.relative_to(made) for path in made.rglob("*") if path.is_file()]
    for path in files:
        os.utime(made / path, (OLD, OLD))
    for number in range(LEAVES):
        for path in files:
            there = tmp_path / f"leaf-{number}" / path
            there.parent.mkdir(parents=True, exist_ok=True)
            os.link(made / path, there)
        for path in (tmp_path / f"leaf-{number}").rglob("*"):
            os.utime(path, (OLD, OLD))
    return write_blend(tmp_path)


def write_blend(folder: Path, leaves: int = LEAVES, name: str = "blend.yaml", **more: Any) -> Path:
    entries = [{"path": f"leaf-{number}", "weight": 1 + number % 7} for number in range(leaves)]
    kind = "Recipe" if more else "MetadatasetV2"
    splits = {"train": {**more, "blend": entries}}
    text = json.dumps({"__module__": "megatron.energon", "__class__": kind, "splits": splits})
    (folder / name).write_text(text)
    os.utime(folder / name, (OLD, OLD))
    return folder / name


def opened(blend: Path, **options: Any) -> SavableDataset:
    return get_train_dataset(blend, **{"batch_size": 4, "worker_config": ALONE, **options})


def delivered(dataset: SavableDataset, batches: int = 8) -> tuple[list[Any], Any]:
    """Keys and places of samples, and a state; by a loader that then is closed."""
    with get_savable_loader(dataset) as loader:
        return places(take(loader, batches)), loader.save_state_rank()


def places(batches: list[Any]) -> list[Any]:
    return [(one.__key__, [source.dataset_path for source in one.__sources__]) for one in batches]


def opened_whole(blend: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> SavableDataset:
    """As if there were few leaves, and no file: all of them are opened."""
    with monkeypatch.context() as patch:
        patch.setattr(opening, "MANY", 1000)
        patch.setenv("ENERGON_LITE_CACHE", str(blend.parent / "other"))
        dataset = opened(blend, **options)
    assert isinstance(dataset.leaves, tuple)
    return dataset


def is_from_file(blend: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[SavableDataset, list[str]]:
    """The data set, and the leaves that were opened to make it."""
    found: list[str] = []
    whole = opening.open_leaves

    def noted(specs: Any, *args: Any, **kwargs: Any) -> Any:
        found.extend(os.path.basename(spec.path) for spec in specs)
        return whole(specs, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(opening, "open_leaves", noted)
        return opened(blend, **options), found


@pytest.mark.parametrize("unit", [None, "tokens"])
@pytest.mark.parametrize(
    "options", [{}, {"shuffle_buffer_size": 8, "max_samples_per_sequence": 2}, {"shuffle_over_epochs_multiplier": -1}]
)
def test_it_is_the_same_blend_as_one_whose_leaves_are_all_open(
    blend: Path, unit: str | None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if unit is not None:
        blend = write_blend(blend.parent, blend_weight_unit=unit)
    cold, first = is_from_file(blend, monkeypatch, **options)
    warm, then = is_from_file(blend, monkeypatch, **options)
    assert len(first) == LEAVES and not then
    plain = opened_whole(blend, monkeypatch, **options)
    assert isinstance(warm.leaves, LeafTable)
    expected = delivered(plain)
    assert delivered(cold) == expected and delivered(warm) == expected
    assert str(plain) == str(warm) and len(plain) == len(warm)
    assert list(plain.identity.leaves) == list(warm.identity.leaves)
    for before, now in ((plain, warm), (warm, plain)):
        with get_savable_loader(now) as loader:
            loader.restore_state_rank(delivered(before)[1])
    if unit is not None:
        write_column(blend.parent / "leaf-3", "length", np.array([50, 10, 90, 20]))
        again = delivered(opened(blend, **options))
        assert again == delivered(opened_whole(blend, monkeypatch, **options)) != expected


def test_repetitions_subsets_labels_and_schedules(blend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("epochs", "schedule"):
        entries: list[dict[str, Any]] = [{"path": f"leaf-{number}"} for number in range(40)]
        entries[3] |= {"subset": {"range": ["25%", "100%"]}, "subflavors": {"from": "leaf 3"}}
        entries[4] |= {"repetitions": 2.5} if kind == "epochs" else {"weight": {0: 1, 100: 0, 200: 3}}
        entries.append({"path": "inner.yaml", "shuffle_over_epochs_multiplier": 2})
        splits = {"train": {"blend_epochized" if kind == "epochs" else "blend": entries}}
        (blend.parent / "inner.yaml").write_text(json.dumps({"splits": {"train": {"path": "leaf-70"}}}))
        blend.write_text(json.dumps({"splits": splits}))
        for path in (blend, blend.parent / "inner.yaml"):
            os.utime(path, (OLD, OLD))
        opened(blend)
        warm, found = is_from_file(blend, monkeypatch)
        assert not found and delivered(warm, 60) == delivered(opened_whole(blend, monkeypatch), 60)
        assert list(warm.leaves)[3].length == 3


def test_no_file_is_made_of_leaves_that_choose_their_split(blend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(blend)  # before one of them does
    path = blend.parent / "leaf-2/.nv-meta/dataset.yaml"
    replace_file(path, path.read_bytes() + b"split_part: train\n")
    os.utime(path, (OLD, OLD))
    opened(blend)
    again = opened(blend)
    assert isinstance(again.leaves, tuple) and delivered(again) == delivered(opened_whole(blend, monkeypatch))


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow), "thread"])
def test_workers(blend: Path, method: Any) -> None:
    expected = delivered(opened(blend))[0]
    dataset = opened(blend, worker_config=alone(2))
    with get_savable_loader(dataset, start_method=method) as loader:
        assert places(take(loader, 8)) == expected
        stats = loader.stats()
    assert sum(one["samples"] for one in stats["datasets"]) == 32
    assert {one["path"] for one in stats["datasets"]} == {path for _, paths in expected for path in paths}


def test_few_leaves_are_open_and_little_is_sent(blend: Path) -> None:
    opened(blend)
    dataset = opened(blend)
    leaves = dataset.leaves
    assert isinstance(leaves, LeafTable) and isinstance(leaves[7], KnownLeaf)
    get_savable_loader(dataset).close()
    assert len(leaves._open) <= 1, "a loader opens leaves before it reads them"
    delivered(dataset, 40)
    assert 0 < len(leaves._open) <= 16
    number = next(iter(leaves._open))
    assert leaves[number] is leaves._open[number] and not isinstance(leaves[number], KnownLeaf)
    assert len(leaves.apart()._open) == len(copy.copy(leaves)._open) == 0
    assert len(pickle.dumps(leaves)) < 150 * LEAVES + 4000
    with pytest.raises(IndexError):
        leaves[LEAVES]
    for one in (leaves[3], leaves[3].apart(), pickle.loads(pickle.dumps(leaves[3]))):
        assert isinstance(one, KnownLeaf) and one.reader.sample(2).parts == {"txt": b"xxx"}
    assert leaves[3].apart().source is not leaves[3].source


def test_wrapped(blend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def sources(samples: list[Any]) -> list[Any]:
        return [sample.__sources__ for sample in samples]

    for make in (opened, opened, lambda path, **options: opened_whole(path, monkeypatch, **options)):
        both = [make(blend, batch_size=None), opened(blend.parent / "leaf-3", batch_size=None)]
        blended = BlendDataset((both[0], 3), (both[1], 1), worker_config=ALONE)
        dataset = BatchDataset(blended, 4, sources, worker_config=ALONE)
        with get_savable_loader(dataset) as loader:
            found.append(take(loader, 8))
    assert found[0] == found[1] == found[2]


def replace_file(path: Path, data: bytes) -> Path:
    path.unlink()  # it is a link to that of the others
    path.write_bytes(data)
    return path


EXCLUDING = b"split_parts: {train: [s0.tar]}\nexclude: [s0.tar/1]\n"
#: What happens to a file of a leaf.
TOUCHED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "the index is touched": (".nv-meta/energon_lite.idx", bytes),
    "dataset.yaml is touched": (".nv-meta/dataset.yaml", bytes),
    "split.yaml is touched": (".nv-meta/split.yaml", bytes),
    "the shard is touched": ("s0.tar", bytes),
    "other data, of the same size and the same first header": ("s0.tar", lambda data: data.replace(b"xxxx", b"yyyy")),
    "another split": (".nv-meta/split.yaml", lambda data: EXCLUDING),
}


@pytest.mark.parametrize("case", TOUCHED)
def test_a_leaf_whose_file_was_touched_is_opened_again_alone(
    blend: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, (name, change) = opened(blend), TOUCHED[case]
    path = blend.parent / "leaf-33" / name
    data = path.read_bytes()
    replace_file(path, change(data))
    os.utime(path, (OLD + 7, OLD + 7))
    after, found = is_from_file(blend, monkeypatch)
    assert found == ["leaf-33"]
    assert delivered(after) == delivered(opened_whole(blend, monkeypatch))
    same = change(data) == data
    changed = np.flatnonzero(before.leaves.keys != after.leaves.keys).tolist()  # type: ignore[attr-defined]
    assert changed[:1] == ([] if same else [33])
    assert (before.identity.fingerprint == after.identity.fingerprint) == same
    assert after.leaves[33].length == (3 if case == "another split" else 4)
    assert not is_from_file(blend, monkeypatch)[1]


def test_broken_leaves_are_told(blend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(blend)
    os.rename(blend.parent / "leaf-9", blend.parent / "gone")
    with pytest.raises(ConfigError, match=r"does not exist[\s\S]*leaf-9"):
        opened(blend)
    os.rename(blend.parent / "gone", blend.parent / "leaf-9")
    assert not is_from_file(blend, monkeypatch)[1]
    replace_file(blend.parent / "leaf-9" / ".nv-meta" / "split.yaml", b"split_parts: 7\n")
    with pytest.raises(ConfigError, match=r"leaf-9/\.nv-meta/split\.yaml"):
        opened(blend)


def test_what_changes_after_the_start_is_told_when_it_is_read(blend: Path) -> None:
    leaves = opened(blend).leaves
    path = replace_file(blend.parent / "leaf-5" / ".nv-meta" / "split.yaml", EXCLUDING)
    with pytest.raises(DataIndexError, match="was changed after the run began"):
        _ = leaves[5].source
    path.unlink()
    with pytest.raises(EnergonLiteError):
        _ = leaves[5].reader


def test_another_document_is_another_blend(blend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(blend)
    write_blend(blend.parent, LEAVES - 1)
    dataset, found = is_from_file(blend, monkeypatch)
    assert len(dataset.leaves) == len(found) == LEAVES - 1
    assert len(is_from_file(blend, monkeypatch, subflavors={"a": 1})[1]) == LEAVES - 1
    assert not is_from_file(blend, monkeypatch, subflavors={"a": 1})[1]
    for options in ({"filter": "tokens <= 4"}, {"read_ahead": ReadAhead()}):
        assert isinstance(opened(blend, **options).leaves, tuple)  # which need their files
    with pytest.raises(UsageError, match="shuffle_over_epochs_multiplier is 0"):
        opened(blend, shuffle_over_epochs_multiplier=0)


@pytest.mark.parametrize("name", ["leaf-33/s0.tar", "blend.yaml"])  # all shards, which are links; or the document
def test_a_file_that_is_new_is_not_trusted(blend: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blend_file, "_LATE", 3600 * 10**9)
    os.utime(blend.parent / name, (time.time() - 1800,) * 2)
    opened(blend)
    assert len(is_from_file(blend, monkeypatch)[1]) == LEAVES


@pytest.mark.parametrize("how", ["cut", "flipped", "version", "other"])
def test_a_damaged_file_is_made_again(blend: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = delivered(opened(blend))
    (file,) = (blend.parent / "cache" / "blends").glob("*.blend")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= how == "flipped"
    data[12] ^= how == "version"
    file.write_bytes(bytes({"cut": data[:-9], "other": b"not one of ours" * 99}.get(how, data)))
    dataset, found = is_from_file(blend, monkeypatch)
    assert len(found) == LEAVES and delivered(dataset) == expected
    assert not is_from_file(blend, monkeypatch)[1]


def test_a_cache_that_cannot_be_written(
    blend: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = delivered(opened(blend))
    (blend.parent / "file").write_text("")
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(blend.parent / "file"))
    assert delivered(opened(blend)) == expected
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize("after", [4, 22])
def test_killed_while_it_writes(blend: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert killed_at(after, lambda: opened(blend), [(ArrayWriter, "_write")])
    assert len(is_from_file(blend, monkeypatch)[1]) == LEAVES
    assert not is_from_file(blend, monkeypatch)[1]


def test_one_process_makes_it_and_the_others_read_it(blend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(results: Any) -> None:
        dataset, opened = is_from_file(blend, monkeypatch)
        results.put((len(opened), dataset.identity.fingerprint))

    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [context.Process(target=make, args=(results,)) for _ in range(3)]
    for process in processes:
        process.start()
    counts, fingerprints = zip(*(results.get() for _ in processes), strict=True)
    for process in processes:
        process.join(60)
    assert sorted(counts) == [0, 0, LEAVES] and len({*fingerprints}) == 1
