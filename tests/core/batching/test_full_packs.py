"""Packs of the beginning of a stream: nothing twice, nothing too full, and full ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.batching.best_fit_decreasing import full_packs
from energon_lite.errors import UsageError
from tests.testing import examples


@settings(max_examples=examples(200))
@given(lengths=st.lists(st.integers(0, 20), max_size=60), capacity=st.integers(20, 60))
def test_a_beginning_in_packs(lengths: list[int], capacity: int) -> None:
    packs, taken = full_packs(lengths, capacity)
    assert sorted(place for pack in packs for place in pack) == [*range(taken)]
    assert all(pack and pack == sorted(pack) and sum(lengths[place] for place in pack) <= capacity for pack in packs)
    assert (taken > 0) == bool(lengths)
    if sum(lengths) < capacity:
        assert taken == len(lengths) and len(packs) == (taken > 0)
    else:  # at least half of what fits into whole packs
        assert sum(lengths[:taken]) > sum(lengths) // capacity // 2 * capacity - max(lengths) * 6


@settings(max_examples=examples(100))
@given(owners=st.lists(st.integers(0, 6), max_size=60), capacity=st.integers(10, 60))
def test_no_two_copies_in_a_pack(owners: list[int], capacity: int) -> None:
    copies = [(owner, owners[:place].count(owner)) for place, owner in enumerate(owners)]
    packs, taken = full_packs([owner + 1 for owner in owners], capacity, copies)
    assert sorted(place for pack in packs for place in pack) == [*range(taken)] and (taken > 0) == bool(owners)
    assert all(len({owners[place] for place in pack}) == len(pack) for pack in packs)
    results = [(owner, 0) for owner in owners]  # several of one sample, of one epoch: they may
    assert full_packs([owner + 1 for owner in owners], capacity, results)[0] == full_packs(
        [owner + 1 for owner in owners], capacity
    )[0]  # fmt: skip


def test_streams_are_packed_fully() -> None:
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(5.5, 0.9, 4000), 8, 4096).astype(int).tolist()
    at = packs = 0
    while at + 128 <= len(lengths):
        made, taken = full_packs(lengths[at : at + 128], 4096)
        at, packs = at + taken, packs + len(made)
    assert sum(lengths[:at]) / (packs * 4096) > 0.99


def test_by_hand() -> None:
    assert full_packs([], 5) == ([], 0)
    assert full_packs([2, 2], 5) == ([[0, 1]], 2)  # together less than a pack
    assert full_packs([5, 5, 1], 5) == ([[0], [1]], 2)
    assert full_packs([3, 3, 2, 2, 4], 5) == ([[0, 2], [1, 3]], 4)
    assert full_packs([4, 4, 4], 5)[1] >= 1  # nothing is full
    with pytest.raises(UsageError, match="a sample of 6 tokens does not fit into a pack of 5"):
        full_packs([1, 6], 5)
