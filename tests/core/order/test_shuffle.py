"""The order inside a leaf: each epoch once, neighbours kept where asked for; runs in windows, whole or by place."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import UsageError
from energon_lite.order.hashing import hash_ints
from energon_lite.order.shuffle import LeafOrder, LeafOrders, Leaves

lengths = st.integers(1, 700)
bounds = st.one_of(st.none(), st.integers(0, 50))


def _stream(leaves: Leaves, count: int, leaf: int = 0, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
    positions = np.arange(start, start + count)
    return leaves.lookup(np.full(count, leaf), positions)


@given(length=lengths, run=bounds, window=bounds, key=st.integers(0, 2**64 - 1), copies=st.sampled_from([1, 2, 3]))
def test_every_cycle_once(length: int, run: int | None, window: int | None, key: int, copies: int) -> None:
    leaves = Leaves([LeafOrder(length, key, copies)], run=run, window=window)
    index, epoch = _stream(leaves, 3 * length * copies)
    for cycle in range(3):
        part = slice(cycle * length * copies, (cycle + 1) * length * copies)
        assert np.array_equal(np.sort(index[part]), np.repeat(np.arange(length), copies))
    assert len(set(zip(index.tolist(), epoch.tolist(), strict=True))) == len(index)
    for sample in (key % length, length - 1):
        places = leaves.places(0, sample, np.arange(3))
        assert np.sort(places, axis=None).tolist() == np.flatnonzero(index == sample).tolist()


@given(length=st.integers(30, 4000), run=st.integers(2, 50), window=st.integers(1, 3000))
def test_runs_stay_near_each_other(length: int, run: int, window: int) -> None:
    """Inside one window lie no more than a few runs: the places of the epoch's windows hold whole runs, cut at most at
    the window's ends and at the short run; nothing comes from elsewhere."""
    index, unmixed = (
        _stream(Leaves([LeafOrder(length, key=7)], run=run, window=one), length)[0] for one in (window, 1)
    )
    for start in range(0, length, window):
        here = index[start : start + window]
        assert len(set((here // run).tolist())) <= -(-len(here) // run) + 2
        assert set(here) == set(unmixed[start : start + window])


def test_without_mixing_runs_are_read_in_order() -> None:
    index, _ = _stream(Leaves([LeafOrder(100, key=7)], run=10, window=1), 100)
    assert [run.tolist() for run in np.split(index, 10)] == [list(range(i, i + 10)) for i in index[::10]]
    assert index[::10].tolist() != sorted(index[::10].tolist())


def test_either_bound_alone_means_a_full_permutation() -> None:
    full, _ = _stream(Leaves([LeafOrder(500, key=7)]), 500)
    for run, window in ((10, None), (None, 10), (1, 10)):
        index, _ = _stream(Leaves([LeafOrder(500, key=7)], run=run, window=window), 500)
        assert np.array_equal(index, full)


@pytest.mark.parametrize("length", [900, 2000, 70_000])  # a table, twelve rounds, six rounds
@pytest.mark.parametrize("windows", [{}, {"run": 1, "window": 50}, {"run": 10, "window": 100}])
def test_epochs_are_independent(length: int, windows: dict[str, int]) -> None:
    """Rank correlation of the places of each sample, between any two of ten epochs."""
    index, epoch = _stream(Leaves([LeafOrder(length, key=7)], **windows), 10 * length)
    orders = np.argsort(index.reshape(10, length), axis=1)
    correlations = np.corrcoef(orders)[np.triu_indices(10, 1)]
    runs = length / windows.get("run", 1)  # what is permuted
    assert np.abs(correlations).max() < 4.5 / np.sqrt(runs)
    assert epoch.tolist() == np.repeat(np.arange(10), length).tolist()


def test_streams_of_leaves_are_independent() -> None:
    index = np.array([_stream(Leaves([LeafOrder(2000, key=key)]), 2000)[0] for key in range(10)])
    correlations = np.corrcoef(np.argsort(index, axis=1))[np.triu_indices(10, 1)]
    assert np.abs(correlations).max() < 4.5 / np.sqrt(2000)


def test_not_shuffled() -> None:
    leaves = Leaves([LeafOrder(3, key=7, copies=None)])
    index, epoch = _stream(leaves, 7)
    assert leaves.places(0, 2, np.array([0, 1])).tolist() == [[2], [5]]
    assert index.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert epoch.tolist() == [0, 0, 0, 1, 1, 1, 2]


def test_drawn_with_replacement() -> None:
    index, _ = _stream(Leaves([LeafOrder(50, key=7, copies=-1)]), 50_000)
    counts = np.bincount(index, minlength=50)
    assert counts.min() > 850 and counts.max() < 1150
    assert len(set(index[:50].tolist())) < 50


@given(data=st.data())
def test_many_leaves_at_once_are_each_by_itself(data: st.DataObject) -> None:
    copies = st.sampled_from([1, 1, 2, -1, None])
    orders = [
        LeafOrder(length, key, copy)
        for length, key, copy in data.draw(
            st.lists(st.tuples(lengths, st.integers(0, 2**63), copies), min_size=1, max_size=5)
        )
    ]
    run, window = data.draw(bounds), data.draw(bounds)
    pairs = data.draw(
        st.lists(st.tuples(st.integers(0, len(orders) - 1), st.integers(0, 2**40)), min_size=1, max_size=40)
    )
    together = Leaves(orders, run=run, window=window)
    index, epoch = together.lookup(np.array([leaf for leaf, _ in pairs]), np.array([at for _, at in pairs]))
    for place, (leaf, at) in enumerate(pairs):
        alone = Leaves([orders[leaf]], run=run, window=window)
        one = alone.lookup(np.array([0]), np.array([at]))
        assert (index[place], epoch[place]) == (one[0][0], one[1][0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LeafOrder(0, key=0), "0 samples"),
        (lambda: LeafOrder(5, key=0, copies=0), "shuffle_over_epochs_multiplier is 0"),
        (lambda: LeafOrder(5, key=0, copies=-2), "shuffle_over_epochs_multiplier is -2"),
        (lambda: LeafOrder(2**61, key=0, copies=4), "62 bits"),
        (lambda: Leaves([LeafOrder(5, key=0)], run=-1), "max_samples_per_sequence is -1"),
        (lambda: Leaves([LeafOrder(5, key=0)], window=-3), "shuffle_buffer_size is -3"),
    ],
)
def test_impossible_orders_are_refused(make: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()  # type: ignore[operator]


def test_golden() -> None:
    """Values for ever. If this changes, so must ORDER_VERSION."""
    digest = hashlib.sha256()
    for order, run, window in (
        (LeafOrder(70_001, key=1), None, None),
        (LeafOrder(5_000, key=2), 100, 1000),
        (LeafOrder(500, key=3, copies=3), 7, 30),
        (LeafOrder(500, key=4, copies=-1), None, None),
    ):
        for start in (0, 10**12):
            for column in _stream(Leaves([order], run=run, window=window), 3000, start=start):
                digest.update(column.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "b6dc47f18505a528"


def test_orders_as_arrays_are_those_of_a_list() -> None:
    lengths, keys = [5, 1, 7], [3, 2**64 - 1, 9]
    for copies in ([1, 1, 1], [None, -1, 4]):
        wanted = [LeafOrder(*one) for one in zip(lengths, (hash_ints(42, key) for key in keys), copies, strict=True)]
        found = LeafOrders.seeded(np.array(lengths), np.array(keys, dtype=np.uint64), copies, 42)
        assert list(found) == wanted
        assert list(Leaves(wanted).leaves) == wanted and LeafOrders.of(found) is found


@pytest.mark.parametrize("copies", [0, -2, 2**62, 2**70])
def test_orders_as_arrays_are_refused_as_single_ones_are(copies: int) -> None:
    with pytest.raises(UsageError) as one:
        LeafOrder(3, 0, copies)
    with pytest.raises(UsageError) as many:
        LeafOrders.seeded(np.array([3]), np.zeros(1, dtype=np.uint64), [copies], 0)
    assert str(many.value) == str(one.value)
