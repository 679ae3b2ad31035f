"""Samples are found by their keys, whatever these are, and however many samples share one."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.storage.index import key_index
from energon_lite.storage.index.key_index import KeyIndex, hash_key, hash_keys
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar_scan import ShardScan
from tests.testing import examples


def index_of(*shards: list[str]) -> PackedIndex:
    return PackedIndex.from_scans([scan_of(f"{number}.tar", keys) for number, keys in enumerate(shards)])


def scan_of(name: str, keys: list[str]) -> ShardScan:
    texts = [key.encode("utf-8", "surrogateescape") for key in keys]
    count = len(keys)
    return ShardScan(
        name=name,
        size=1,
        head=0,
        end=1,
        headers=np.zeros(count, dtype=np.int64),
        first_part=np.arange(count + 1, dtype=np.int64),
        parts=np.zeros((count, 3), dtype=np.int64),
        part_names=("txt",) if count else (),
        key_offsets=np.cumsum([0, *map(len, texts)], dtype=np.int64),
        keys=b"".join(texts),
        notes=(),
        mtime_ns=0,
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENERGON_LITE_CACHE", os.fspath(tmp_path / "cache"))
    return tmp_path / "cache"


KEYS = st.lists(st.text(st.sampled_from("ab/.0ü\udcff"), min_size=1, max_size=6), max_size=30)


@settings(max_examples=examples(60))
@given(KEYS, KEYS)
def test_each_key_is_found_where_it_is(first: list[str], second: list[str]) -> None:
    keys = first + second
    found = KeyIndex(index_of(first, second))
    for key in {*keys, "no such", "a"}:
        assert found.find(key) == [number for number, one in enumerate(keys) if one == key]


def test_many_keys_and_what_is_not_among_them(cache: Path) -> None:
    keys = [f"folder/{number:07d}" for number in range(200_000)]
    index = index_of(keys)
    found = KeyIndex(index)
    wanted = [0, 1, 77_777, 131_071, 131_072, 199_999]
    assert [found.find(keys[number]) for number in wanted] == [[number] for number in wanted]
    assert found.find("folder/0200000") == found.find("") == []
    assert [path.name for path in (cache / "keys").iterdir()] == [f"{index.digest}.keys"]


def test_equal_hashes_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "_mixed", lambda values: np.full_like(values, 7 << 60))
    found = KeyIndex(index_of([f"{number}" for number in range(2000)]))
    assert found.find("1999") == [1999] and found.find("2000") == []


def test_hashes_are_spread_and_do_not_depend_on_neighbours() -> None:
    keys = [f"{number:08d}" for number in range(4096)]
    hashes, others = hash_keys(index_of(keys[:1000], keys[1000:]), np.arange(4096), words=2)
    assert len(np.unique(hashes)) == len(np.unique(others)) == len(keys) and not (hashes == others).any()
    assert [hash_key(key) for key in keys[::512]] == hashes[::512].tolist()
    counts = np.bincount((hashes >> np.uint64(60)).astype(np.int64), minlength=16)
    assert counts.min() > 180 and counts.max() < 340


def test_a_damaged_file_is_made_again_and_none_is_needed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of(["a", "b"])
    KeyIndex(index)
    (path,) = (cache / "keys").iterdir()
    path.write_bytes(b"nonsense")
    assert KeyIndex(index).find("b") == [1] and path.stat().st_size > 8
    cache.rename(cache.parent / "moved")
    cache.write_text("no folder can be made here")
    assert KeyIndex(index).find("b") == [1]
