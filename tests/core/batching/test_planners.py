"""The strategies on examples one can check by hand, the parts they are made of, and packs of a stream's beginning."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, insort
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.batching.best_fit_decreasing import full_packs, pack_histogram
from energon_lite.batching.capacity import Capacity, checked_lengths
from energon_lite.batching.micro_batches import PLAN_ORDERS, POLICIES, MicroBatches, cut_to_fit
from energon_lite.batching.plan import Counts
from energon_lite.batching.strategy import plan_in_chunks, strategy_from_dict
from energon_lite.errors import UsageError
from tests.testing import examples


def plan(lengths: list[int], **document: Any) -> MicroBatches:
    return strategy_from_dict(document).plan(np.array(lengths, dtype=np.int64), seed=0)


def groups(batches: MicroBatches) -> list[list[int]]:
    return [part.tolist() for part in batches]


# -- the examples of DynamiCat's document ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "strategy", "more", "expected"),
    [
        ([3, 1, 2, 5, 4], "fixed", {"batch_size": 2}, [[0, 1], [2, 3], [4]]),
        ([3, 1, 2, 5, 4], "fixed", {"batch_size": 2, "sort": True}, [[1, 2], [0, 4], [3]]),
        # Six samples with 10 tokens between them take 18 when they are padded to 3: that is no capacity of 10.
        ([1, 1, 1, 2, 2, 3, 5, 5], "capacity", {"unit": "packed_tokens"}, [[0, 1, 2, 3, 4, 5], [6, 7]]),
        ([1, 1, 1, 2, 2, 3, 5, 5], "capacity", {}, [[0, 1, 2, 3, 4], [5, 6], [7]]),
        ([3, 6, 0, 3], "concat_split", {"tokens": 4}, [[0, 1], [1], [1, 3]]),
        # Smart batching.
        ([5, 3, 1, 5, 2, 1, 2, 1], "sorted_window", {"batches": None}, [[0, 3], [1, 4, 6], [2, 5, 7]]),
        # Windows have equal tokens, and do not mix.
        ([1, 2, 3, 4, 4, 3, 2, 1], "sorted_window", {"batches": 1}, [[3, 2], [1, 0], [4, 5], [6, 7]]),
        # 4 fits beside 6 and beside 5, and leaves less room beside 6. 9 fits nowhere: the fullest of two is emitted.
        ([6, 5, 4, 9, 3, 8], "best_fit", {"open_bins": 2}, [[0, 2], [3], [1, 4], [5]]),
        ([6, 5, 4], "best_fit", {}, [[0, 2], [1]]),
        # What is too old is emitted.
        ([7, 9, 9, 3], "best_fit", {"max_age": 3}, [[0], [1], [2], [3]]),
        ([7, 9, 9, 3], "best_fit", {"max_age": 4}, [[0, 3], [1], [2]]),
    ],
)
def test_groups(lengths: list[int], strategy: str, more: dict[str, Any], expected: list[list[int]]) -> None:
    own = {} if strategy in ("fixed", "concat_split") else {"capacity": 10}
    own |= {"order": "none"} if strategy == "sorted_window" else {}
    batches = plan(lengths, strategy=strategy, **own, **more)
    assert groups(batches) == expected
    assert more.get("batches") != 1 or batches.lateness_bound == 4


@pytest.mark.parametrize(
    ("order", "rows", "space"),
    [
        ("none", [2, 3, 3], [10, 9, 3]),
        ("bs_asc", [2, 3, 3], [10, 9, 3]),
        ("bs_desc", [3, 3, 2], [9, 3, 10]),
        ("pc_asc", [3, 3, 2], [3, 9, 10]),
        ("pc_desc", [2, 3, 3], [10, 9, 3]),
    ],
)
def test_plan_orders(order: str, rows: list[int], space: list[int]) -> None:
    batches = plan([5, 3, 1, 5, 2, 1, 2, 1], strategy="sorted_window", capacity=10, batches=None, order=order)
    assert batches.rows().tolist() == rows and batches.space().tolist() == space
    assert (batches.attention() == batches.space() * batches.longest()).all()


def test_a_random_order_shuffles_and_loses_nothing() -> None:
    sorted_ones = plan([*range(1, 101)], strategy="fixed", batch_size=2, order="none")
    shuffled = plan([*range(1, 101)], strategy="fixed", batch_size=2, order="random")
    assert groups(shuffled) != groups(sorted_ones) and sorted(groups(shuffled)) == groups(sorted_ones)
    assert set(PLAN_ORDERS) == {"bs_asc", "bs_desc", "pc_asc", "pc_desc", "random", "none"}


# -- the others -----------------------------------------------------------------------------------------------------


def test_length_difference_groups_by_the_key_field() -> None:
    strategy = strategy_from_dict(
        {"strategy": "length_difference", "batch_size": 3, "max_difference": 2, "key": "prompt", "order": "none"}
    )
    batches = strategy.plan(np.array([100, 1, 50, 7, 9]), key_lengths=np.array([4, 9, 1, 3, 2]))
    assert groups(batches) == [[2, 4, 3], [0], [1]]
    assert batches.length.tolist() == [50, 9, 7, 100, 1]
    with pytest.raises(UsageError, match="groups by the field 'prompt'"):
        strategy.plan(np.array([1, 2]))
    with pytest.raises(UsageError, match="1 key_lengths for 2 samples"):
        strategy.plan(np.array([1, 2]), key_lengths=np.array([1]))


def test_max_length_splits_the_key_field() -> None:
    document = {"strategy": "max_length", "batch_size": 2, "max_length": 4, "key": "content"}
    batches = strategy_from_dict(document).plan(np.array([9, 20, 3]), key_lengths=np.array([4, 9, 1]))
    assert groups(batches) == [[0, 1], [1, 1], [2]]
    assert batches.length.tolist() == [9, 4, 4, 1, 3] and batches.start.tolist() == [0, 0, 4, 8, 0]
    dropped = strategy_from_dict({**document, "oversize": "drop"}).plan(
        np.array([9, 20, 3]), key_lengths=np.array([4, 9, 1])
    )
    assert groups(dropped) == [[0, 2]] and dropped.counts == Counts(dropped_samples=1, dropped_tokens=9)
    ordered = strategy_from_dict({**document, "sort": True})  # as long as their pieces
    assert groups(ordered.plan(np.array([20, 9, 9]), key_lengths=np.array([8, 5, 2]))) == [[2, 0], [0, 1], [1]]
    assert plan([3, 0, 6], strategy="concat_split", tokens=4).counts == Counts(dropped_samples=1, split_samples=1)


def _textbook_best_fit_decreasing(sizes: list[int], limit: int) -> list[int]:
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        place = bisect_left(rooms, size)
        room = rooms.pop(place) if place < len(rooms) else limit
        insort(rooms, room - size)
    return rooms


@given(st.lists(st.integers(1, 30), max_size=200), st.integers(30, 80))
def test_the_histogram_packs_like_the_textbook(sizes: list[int], limit: int) -> None:
    inside, offsets = pack_histogram(np.bincount(np.array(sizes, dtype=np.int64)), limit)
    assert sorted(inside.tolist()) == sorted(sizes)
    used = np.diff(np.concatenate([[0], np.cumsum(inside)])[offsets])
    assert sorted((limit - used).tolist()) == _textbook_best_fit_decreasing(sizes, limit)


def test_bfd_deals_samples_of_one_size_at_random() -> None:
    lengths = np.tile([7, 3], 500)
    batches = strategy_from_dict({"strategy": "bfd", "capacity": 10}).plan(lengths, seed=1)
    assert (batches.tokens() == 10).all()
    pairs = np.sort(batches.sample.reshape(-1, 2), axis=1)
    assert np.abs(np.diff(pairs)).mean() > 200  # neighbours in the stream would be 1 apart


def test_bfd_in_parts() -> None:
    batches = strategy_from_dict({"strategy": "bfd", "capacity": 10, "chunk": 4}).plan(np.full(10, 5))
    assert len(batches) == 6  # parts of 3, 3 and 4 samples
    assert max(abs(int(part.max()) - int(part.min())) for part in batches) < 4


# -- samples that are too long --------------------------------------------------------------------------------------


def test_what_is_done_with_long_samples() -> None:
    lengths, capacity = np.array([3, 25, 10, 11]), Capacity(10)
    assert cut_to_fit(lengths, capacity, "drop").sample.tolist() == [0, 2]
    assert cut_to_fit(lengths, capacity, "drop").counts == Counts(dropped_samples=2, dropped_tokens=36)
    assert cut_to_fit(lengths, capacity, "truncate").length.tolist() == [3, 10, 10, 10]
    assert cut_to_fit(lengths, capacity, "truncate").counts == Counts(truncated_samples=2, truncated_tokens=16)
    pieces = cut_to_fit(lengths, capacity, "split")
    assert pieces.sample.tolist() == [0, 1, 1, 1, 2, 3, 3]
    assert pieces.start.tolist() == [0, 0, 10, 20, 0, 0, 10]
    assert pieces.length.tolist() == [3, 10, 10, 5, 10, 10, 1]
    assert cut_to_fit(lengths, capacity, "own_batch").counts == Counts(own_batches=2)
    with pytest.raises(UsageError, match=r"2 of 4 samples .* the first of them in the plan has 25 tokens") as caught:
        cut_to_fit(lengths, capacity, "error")
    for choice in set(POLICIES) - {"error"}:  # what the message proposes ends the trouble, literally
        assert f'"{choice}" (' in str(caught.value)
        assert len(strategy_from_dict({"strategy": "best_fit", "capacity": 10, "oversize": choice}).plan(lengths))
    with pytest.raises(UsageError, match="no rule 'cut'"):
        cut_to_fit(lengths, capacity, "cut")  # type: ignore[arg-type]


@given(st.integers(2, 10**6), st.sampled_from([1, 8]))
def test_the_largest_length_is_the_largest(limit: int, multiple: int) -> None:
    for unit in ("packed_tokens", "padded_tokens", "cost"):
        if limit < multiple + 1:
            continue
        capacity = Capacity(limit, unit, multiple)  # type: ignore[arg-type]
        most = capacity.largest_length()
        below, above = capacity.sizes(np.array([most, most + 1])).tolist()
        assert below <= limit < above


def test_the_largest_length_where_all_fit() -> None:
    assert Capacity(9, unit="cost", cost=np.ones_like).largest_length() == 1 << 31


def test_lengths_that_are_none() -> None:
    for lengths, message in (([[1]], "one-dimensional"), ([0.5], "one-dimensional"), ([1, -1], r"lengths\[1\] is -1")):
        with pytest.raises(UsageError, match=message):
            checked_lengths(lengths)
    assert checked_lengths([]).dtype == np.int64
    assert len(strategy_from_dict({"strategy": "best_fit", "capacity": 5}).plan(checked_lengths([]))) == 0


def test_chunks() -> None:
    strategy = strategy_from_dict({"strategy": "best_fit", "capacity": 4, "oversize": "split"})
    batches = plan_in_chunks(strategy, np.array([2, 1, 2, 6, 1]), chunk=2)
    assert groups(batches) == [[0, 1], [3], [2, 3], [4]]
    assert batches.counts == Counts(split_samples=1)
    triples = strategy_from_dict({"strategy": "fixed", "batch_size": 3})  # 131,072 are planned together
    assert len(plan_in_chunks(triples, np.ones((1 << 17) + 1, dtype=np.int64))) == 43_691 + 1
    with pytest.raises(UsageError, match="chunk is 0"):
        plan_in_chunks(strategy, np.array([2]), chunk=0)


def test_a_micro_batch_that_is_not_there() -> None:
    batches = plan([1, 2, 3], strategy="fixed", batch_size=2)
    assert batches[-1].tolist() == [2]
    with pytest.raises(IndexError, match="micro-batch 2 of 2"):
        batches[2]


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


def test_golden_packs() -> None:
    """Values for ever. If they change, so must the version of the algorithm."""
    draw = np.random.default_rng(1)
    streams = [draw.integers(1, draw.integers(2, 40), draw.integers(2, 80)).tolist() for _ in range(50)]
    packed = [full_packs(lengths, 40) for lengths in streams]
    assert hashlib.sha256(json.dumps(packed).encode()).hexdigest()[:16] == "ac669ccaed30b203"


def test_by_hand() -> None:
    assert full_packs([], 5) == ([], 0)
    assert full_packs([2, 2], 5) == ([[0, 1]], 2)  # together less than a pack
    assert full_packs([5, 5, 1], 5) == ([[0], [1]], 2)
    assert full_packs([9] * 20, 10) == ([[number] for number in range(20)], 20)  # the most of those of equal fill
    assert full_packs([3, 3, 2, 2, 4], 5) == ([[0, 2], [1, 3]], 4)
    assert full_packs([4, 4, 4], 5)[1] >= 1  # nothing is full
    with pytest.raises(UsageError, match="a sample of 6 tokens does not fit into a pack of 5"):
        full_packs([1, 6], 5)
