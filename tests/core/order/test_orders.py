"""Positions to addresses, for training and for validation; what a look-up costs, wherever it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import energon_lite
from energon_lite.errors import UsageError
from energon_lite.order.hashing import HashDomain
from energon_lite.order.orders import BlendOrder, ConcatOrder, EpochBlendOrder, Rebase
from energon_lite.order.shuffle import LeafOrder
from tests.testing import examples


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=6), seed=st.integers(0, 2**32), epochs=st.integers(1, 3)
)
def test_each_leaf_of_a_blend_finishes_an_epoch_before_the_next(lengths: list[int], seed: int, epochs: int) -> None:
    weights = [1.0 + leaf for leaf in range(len(lengths))]
    order = BlendOrder([LeafOrder(length, seed + leaf) for leaf, length in enumerate(lengths)], weights, key=seed)
    found = order.lookup(np.arange(5000))
    for leaf, length in enumerate(lengths):
        here = found.leaf == leaf
        whole = np.count_nonzero(here) // length
        for epoch in range(min(epochs, whole)):
            part = slice(epoch * length, (epoch + 1) * length)
            assert np.array_equal(np.sort(found.index[here][part]), np.arange(length))
            assert set(found.epoch[here][part].tolist()) == {epoch}


def test_one_leaf_needs_no_blend() -> None:
    order = BlendOrder([LeafOrder(4, key=1)], [0.3], key=0, length=4)
    found = order.lookup(np.arange(4))
    assert sorted(found.index.tolist()) == [0, 1, 2, 3]
    assert order.bounds(2) == (8, 12)
    assert BlendOrder([LeafOrder(4, key=1)], [0.3], key=0).bounds(0) is None


def test_one_leaf_after_the_other() -> None:
    order, rows = ConcatOrder([2, 1]), [(0, 0, 0), (0, 1, 0), (1, 0, 0)]
    assert order.lookup(np.arange(3)).rows() == rows
    assert [order.position(leaf, index) for leaf, index, _ in rows] == [0, 1, 2]


@given(
    length=st.integers(1, 20),
    copies=st.sampled_from([1, 2, None]),
    numbers=st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.integers(1, 99)),
)
def test_ends_of_epochs(length: int, copies: int | None, numbers: tuple[int, int, int, int]) -> None:
    """Between two positions, both excluded; also in the middle of a run."""
    position, shown, first, span = numbers
    order = BlendOrder([LeafOrder(length, 1, copies)], [1.0], key=0).rebased(Rebase(position, (shown,)))
    first += position
    cycles = order.cycles(order.lookup(np.arange(first, first + span)))
    assert order.epoch_ends(first, first + span) == (first + 1 + np.flatnonzero(np.diff(cycles))).tolist()
    blend = EpochBlendOrder([LeafOrder(3, 1), LeafOrder(4, 2)], [1, 2], key=0).rebased(Rebase(100, (0, 0)))
    assert blend.epoch_ends(100, 133) == [111, 122] and blend.epoch_ends(111, 134) == [122, 133]


@settings(max_examples=examples(75))
@given(data=st.data(), copies=st.sampled_from([1, 2]), repeats=st.booleans())
def test_any_requests_give_the_same(data: st.DataObject, copies: int, repeats: bool) -> None:
    """What earlier requests left behind (blocks, halves, keys of epochs, epochs) never shows: blends by weight and by
    repetitions, tables, both kinds of networks, and a leaf that is in several epochs within one request."""

    def order() -> BlendOrder | EpochBlendOrder:
        if repeats:  # epochs of 17,361 positions
            return EpochBlendOrder(leaves, [3, 1, 5, 0.1, 1e-6, 1e-15], key=9)
        return BlendOrder(leaves, [3, 1, 5, 1, 1, 1], key=9)

    leaves = [LeafOrder(length, key, copies) for key, length in enumerate((3, 700, 1500, 70_000, 10**9, 2**60))]
    start = data.draw(st.integers(0, 2**40))
    requests = data.draw(st.lists(st.tuples(st.integers(0, 12_000), st.integers(0, 9_000)), min_size=1, max_size=6))
    used = order()
    for offset, length in requests:
        positions = start + offset + np.arange(length)
        if data.draw(st.booleans()):
            positions = np.random.default_rng(length).permutation(positions)
        found, again = used.lookup(positions), order().lookup(positions)
        for column, expected in zip(found.columns(), again.columns(), strict=True):
            assert np.array_equal(column, expected)
        for place in range(0, length, 997):  # each position by itself
            one = order().lookup(positions[place : place + 1])
            assert (one.leaf[0], one.index[0], one.epoch[0]) == found.rows()[place]


def test_leaves_and_weights_must_match() -> None:
    with pytest.raises(UsageError, match="2 leaves, but 1 weights"):
        BlendOrder([LeafOrder(4, key=1)] * 2, [1.0], key=0)


def test_purposes_of_hashes_differ() -> None:
    """One value for each purpose, so no two decisions are made by one hash."""
    assert len({domain.value for domain in HashDomain.__members__.values()}) == len(HashDomain.__members__) > 20


CODE = """
import json, resource, time
import numpy as np
from energon_lite.order.orders import BlendOrder
from energon_lite.order.shuffle import LeafOrder

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

BlendOrder([LeafOrder(10, 0)] * 2, [1, 2], key=0).lookup(np.arange(3))
before = peak()
weights = np.random.default_rng(0).random(1000).tolist()
order = BlendOrder([LeafOrder(60_000, key) for key in range(1000)], weights, key=1)
found = {}
for position in (0, 10**15):
    times = []
    for _ in range(8):
        start = time.process_time()
        for at in range(position, position + (1 << 16), 8192):
            order.lookup(np.arange(at, at + 8192))
        times.append((time.process_time() - start) * 1e9 / (1 << 16))
        position += 1 << 16
    found[str(position)] = min(times)
print(json.dumps({"nanoseconds": list(found.values()), "MiB": peak() - before}))
"""


def test_a_thousand_leaves_of_sixty_thousand_samples() -> None:
    """64 MiB; and 200 ns a sample, twice as many here because the machine may be busy (it takes 70 to 100)."""
    environment = os.environ | {"PYTHONPATH": str(Path(energon_lite.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=True)
    found = json.loads(done.stdout)
    assert found["MiB"] < 64
    assert max(found["nanoseconds"]) < 400
