"""A store says what it has, as Energon's do, without reading a shard."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite.errors import MissingEntryError
from energon_lite.extras.media import JsonlFileStore, WebdatasetFileStore, webdataset_store
from energon_lite.storage.prepare import prepare_dataset, prepare_jsonl


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENERGON_LITE_CACHE", os.fspath(tmp_path / "cache"))


@pytest.fixture
def prepared(make_tar: Callable[..., Path], tmp_path: Path) -> Path:
    """Three shards; parts of all sizes, long names that need headers of their own, and keys with dots in folders."""
    for shard, first in (("a", 0), ("b", 3), ("c", 7)):
        members = []
        for number in range(first, first + 3 + (shard == "b")):
            key = f"{'deep.er/' * (number % 3 == 1)}{'k' * (150 if number == 4 else 1)}{number}"
            members += [(f"{key}.txt", b"x" * (number * 211)), (f"{key}.seg.json", json.dumps([number]).encode())]
        make_tar(f"data/{shard}.tar", members, tarfile.GNU_FORMAT)
    prepare_dataset(tmp_path / "data", split_ratio="1,1,1")
    return tmp_path / "data"


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"n": 0}\n\n  {"n": "long"}  \n{"n": 2}\n')
    prepare_jsonl(path)
    return path


def test_what_a_prepared_data_set_has(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = WebdatasetFileStore(prepared)
    samples, parts = list(store.list_all_samples()), list(store.list_all_sample_parts())
    assert len(samples) == len(store) == 10 and len(parts) == 20
    assert [shard for _, _, shard in samples] == [0] * 3 + [1] * 4 + [2] * 3
    for name, size, _ in parts:
        assert len(store.get(name)) == size
    for key, size, shard in samples:
        assert [(f"{key}.{part}", *others) for part, *others in store.list_sample_parts(key)] == [
            one for one in parts if one[0].startswith(f"{key}.")
        ]
        assert size % tarfile.BLOCKSIZE == 0 and shard in range(3)
    assert store.get_total_size() == sum(size for _, size, _ in samples)
    monkeypatch.setattr(webdataset_store, "_LISTED", 2)  # stretches end in the middle of a shard
    assert list(store.list_all_samples()) == samples and list(store.list_all_sample_parts()) == parts
    with pytest.raises(MissingEntryError, match="no sample 'nobody'"):
        next(store.list_sample_parts("nobody"))
    store.close()
    assert store.get(parts[3][0])


def test_what_a_jsonl_file_has(lines: Path) -> None:
    store = JsonlFileStore(lines)
    samples = list(store.list_all_samples())
    assert [(key, shard) for key, _, shard in samples] == [("0", 0), ("1", 0), ("2", 0)]
    assert sum(size for _, size, _ in samples) == store.get_total_size() == lines.stat().st_size
    parts = list(store.list_all_sample_parts())
    assert [json.loads(store.get(name))["n"] for name, _, _ in parts] == [0, "long", 2]
    assert [part for key, _, _ in samples for part in store.list_sample_parts(key)] == parts
    for key in ("3", "-1", "x", ""):
        with pytest.raises(MissingEntryError):
            next(store.list_sample_parts(key))


def test_the_same_as_energon_lists(prepared: Path, lines: Path) -> None:
    pytest.importorskip("megatron.energon")
    from megatron.energon.cache.file_store import JsonlFileStore as TheirJsonl
    from megatron.energon.cache.file_store import WebdatasetFileStore as TheirWebdataset
    from megatron.energon.epathlib import EPath

    def listed(store: Any, key: str) -> list[Any]:
        return [*store.list_all_sample_parts(), *store.list_sample_parts(key), store.get_total_size(), len(store)]

    theirs, ours = TheirWebdataset(EPath(prepared)), WebdatasetFileStore(prepared)
    assert list(ours.list_all_samples()) == list(theirs.list_all_samples())
    for key, _, _ in ours.list_all_samples():
        assert listed(ours, key) == listed(theirs, key)
        assert list(ours.list_sample_parts(key, slow_mode=True)) == list(theirs.list_sample_parts(key, slow_mode=True))
    their_lines, our_lines = TheirJsonl(EPath(lines)), JsonlFileStore(lines)
    assert our_lines.get_total_size() == their_lines.get_total_size()
    for key in "012":
        assert list(our_lines.list_sample_parts(key)) == list(their_lines.list_sample_parts(key))
    # Energon's lists count lines from 1, and so name a part that is not there, and leave out the first.
    shifted = [(str(int(key) + 1), size, shard) for key, size, shard in our_lines.list_all_samples()]
    assert shifted == list(their_lines.list_all_samples())
