"""Matching keys: against a dict, for keys of all lengths, chosen in any order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.extras.energon.joins import SampleKeys, match_keys
from energon_lite.storage.index import key_index
from energon_lite.storage.index.packed_index import PackedIndex
from tests.core.storage.test_packed_index import scan_of


def keys_of(names: list[str], chosen: list[int] | None = None) -> SampleKeys:
    scan = scan_of("s.tar", [(name, []) for name in names])
    samples = np.arange(len(names)) if chosen is None else np.array(chosen, dtype=np.int64)
    return SampleKeys(PackedIndex.from_scans([scan]), samples)


NAMES = st.lists(st.text("ab0/ü", max_size=12), unique=True, max_size=40)


@given(NAMES, NAMES, st.randoms())
def test_it_is_what_a_dict_says(ours: list[str], theirs: list[str], dice: object) -> None:
    chosen = list(range(len(theirs)))
    dice.shuffle(chosen)  # type: ignore[attr-defined]
    chosen = chosen[: len(chosen) // 2 + 1]
    there = {theirs[number]: place for place, number in enumerate(chosen)}
    found = match_keys(keys_of(ours), keys_of(theirs, chosen))
    assert found.tolist() == [there.get(name, -1) for name in ours]


def test_blocks_and_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "_BLOCK", 7)
    names = [f"{'long' * (n % 9)}{n}" for n in range(5000)]
    far = list(range(0, 5000, 499))  # so far apart that they are read one by one
    assert match_keys(keys_of(names, far), keys_of(names)).tolist() == far
    assert match_keys(keys_of(names), keys_of(names[::-1])).tolist() == list(range(5000))[::-1]


def test_hashes_that_meet_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "_factors", lambda count, words: np.ones((words, count), dtype=np.uint64))
    names = ["ab", "ba", "c", "abc", "cab"]  # anagrams have one hash
    keys = keys_of(names)
    assert keys.twice() == []
    assert match_keys(keys_of(["cab", "x", "ba"]), keys).tolist() == [4, -1, 1]


def test_keys_that_are_there_twice() -> None:
    assert keys_of(["a", "b", "a", "c", "b", "a"]).twice() == ["a", "b"]
    assert keys_of(["a", "b", "a"], [0, 1]).twice() == []
    assert keys_of([]).twice() == [] and match_keys(keys_of(["a"]), keys_of([])).tolist() == [-1]
