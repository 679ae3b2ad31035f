"""The micro-batches of a step: as many and as much for each rank, nothing lost, nothing too full."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.batching.capacity import Capacity, Ints
from energon_lite.batching.exchange import exchange_samples
from energon_lite.batching.micro_batches import MicroBatches
from energon_lite.batching.steps import _differencing, assign, even_step, rank_slot, whole_steps
from energon_lite.batching.strategy import packing_capacity, strategy_from_dict
from energon_lite.errors import TopologyError, UsageError
from tests.core.batching.test_strategies import lateness
from tests.testing import examples


def loads(values: Ints, assigned: Ints) -> Ints:
    return values[assigned].sum(axis=0)


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_each_rank_gets_as_many(ranks: int, each: int, data: st.DataObject) -> None:
    count = ranks * each
    values = st.lists(st.integers(0, 10**6), min_size=count, max_size=count)
    tokens, cost = np.array(data.draw(values)), np.array(data.draw(values))
    assigned = assign(np.stack([tokens, cost]), ranks)
    assert assigned.shape == (each, ranks)
    assert sorted(assigned.reshape(-1).tolist()) == list(range(count))
    assert assign(np.stack([tokens, cost]), ranks).tolist() == assigned.tolist()


def test_by_hand() -> None:
    tokens = np.array([8, 7, 6, 5, 4, 3, 2, 1])
    assert loads(tokens, assign(np.stack([tokens, tokens]), 4)).tolist() == [9, 9, 9, 9]
    # Tokens alone would pair any two; the costs decide.
    costs = np.array([9, 9, 1, 1])
    assert sorted(loads(costs, assign(np.stack([np.full(4, 10), costs]), 2)).tolist()) == [10, 10]


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(st.integers(1, 100), min_size=6, max_size=6))
def test_the_deal_is_near_the_best_there_is(values: list[int]) -> None:
    tokens = np.array(values)
    found = int(loads(tokens, assign(np.stack([tokens, tokens]), 3)).max())
    best = min(max(a + b, c + d, e + f) for a, b, c, d, e, f in permutations(values))
    assert found == best  # pairs: largest with smallest is the best there is


@settings(deadline=None, max_examples=examples(30))
@given(st.integers(0, 2**32 - 1))
def test_many_micro_batches_balance_well(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, cost = rng.integers(9000, 10_000, 64), rng.integers(1, 100, 64) ** 2
    assigned = assign(np.stack([tokens, cost]), 8)
    for values in (tokens, cost):
        found = loads(values, assigned)
        assert found.mean() > 0.95 * found.max()


def test_what_cannot_be_dealt() -> None:
    with pytest.raises(TopologyError, match="5 micro-batches of a step cannot be assigned to 2 ranks"):
        assign(np.ones((2, 5), dtype=np.int64), 2)
    assert assign(np.zeros((2, 0), dtype=np.int64), 2).shape == (0, 2)


# -- exchanging samples ---------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=examples(150))
@given(st.lists(st.integers(0, 40), max_size=150), st.integers(5, 60), st.integers(1, 9))
def test_an_exchange_keeps_the_step_and_the_capacity(values: list[int], limit: int, step: int) -> None:
    document = {"strategy": "best_fit", "capacity": limit, "open_bins": 3, "oversize": "own_batch"}
    batches = strategy_from_dict(document).plan(np.array(values, dtype=np.int64))
    even = exchange_samples(batches, Capacity(limit), step=step)
    assert len(even) == len(batches)
    assert (np.diff(even.offsets) > 0).all()
    assert ((even.tokens() <= limit) | (even.rows() == 1)).all()
    for first in range(0, len(batches), step):
        before, after = (plan.select(np.arange(first, min(first + step, len(plan)))) for plan in (batches, even))
        assert entries(before) == entries(after)
        assert after.attention().max() <= before.attention().max()
    assert even.lateness_bound >= lateness(even).max(initial=0)


def test_one_long_sample_is_exchanged_for_several_short_ones() -> None:
    lengths = np.array([8, 8, 4, 4, 4, 4])
    batches = strategy_from_dict({"strategy": "capacity", "capacity": 16, "unit": "packed_tokens"}).plan(lengths)
    assert batches.attention().tolist() == [128, 64]
    even = exchange_samples(batches, Capacity(16), step=2)
    assert even.attention().tolist() == [96, 96] and even.tokens().tolist() == [16, 16]
    batches = strategy_from_dict({"strategy": "concat_split", "tokens": 23}).plan(np.array([4, 6, 5, 1, 1, 6, 3]))
    within = exchange_samples(batches, Capacity(23), step=2)  # at most 2 % above the mean: it is left
    assert within.attention().tolist() == [63, 61]
    batches = strategy_from_dict({"strategy": "concat_split", "tokens": 13}).plan(np.array([8, 5, 6, 3]))
    assert exchange_samples(batches, Capacity(13), step=2).tokens().tolist() == [11, 11]  # not [14, 8]


def test_packed_micro_batches_become_even() -> None:
    lengths = np.minimum(np.exp(np.random.default_rng(0).normal(5.5, 0.7, 4000)), 2000).astype(np.int64)
    batches = strategy_from_dict({"strategy": "best_fit", "capacity": 6000}).plan(lengths)
    even = exchange_samples(batches, Capacity(6000), step=8)
    steps = len(batches) // 8
    before, after = (plan.attention()[: steps * 8].reshape(steps, 8) for plan in (batches, even))
    balance = [float((costs.mean(axis=1) / costs.max(axis=1)).mean()) for costs in (before, after)]
    assert balance[0] < 0.7 and balance[1] > 0.9


def test_padded_micro_batches_are_not_exchanged() -> None:
    padded = strategy_from_dict({"strategy": "fixed", "batch_size": 2}).plan(np.ones(4, dtype=np.int64))
    with pytest.raises(UsageError, match="packed micro-batches only"):
        exchange_samples(padded, Capacity(9), step=2)


def _textbook_differencing(weights: list[int], ranks: int) -> list[list[int]]:
    """Karmarkar and Karp with equal counts: the two that differ most inside are put together, large sums with small."""
    order = sorted(range(len(weights)), key=lambda number: -weights[number])
    left = [[(weights[one], [one]) for one in order[first : first + ranks]] for first in range(0, len(order), ranks)]
    while len(left) > 1:
        left.sort(key=lambda parts: parts[-1][0] - parts[0][0])  # stable: of equal ones, the oldest first
        one, other, *left = left
        merged = [(a + b, mine + yours) for (a, mine), (b, yours) in zip(one, reversed(other), strict=True)]
        left.append(sorted(merged, key=lambda part: (-part[0], part[1])))
    return [numbers for _, numbers in left[0]]


@given(ranks=st.integers(2, 4), turns=st.integers(1, 6), data=st.data())
def test_differencing_is_that_of_the_textbook(ranks: int, turns: int, data: st.DataObject) -> None:
    count = ranks * turns
    weights = data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    assert [sorted(one) for one in _differencing(weights, ranks)] == [
        sorted(one) for one in _textbook_differencing(weights, ranks)
    ]


DOCUMENTS: list[dict[str, Any]] = [
    {"strategy": "best_fit", "capacity": 100, "open_bins": 3},
    {"strategy": "best_fit", "capacity": 100, "unit": "cost", "alpha": 50, "oversize": "own_batch"},
    {"strategy": "bfd", "capacity": 60, "multiple": 4, "oversize": "split"},
    {"strategy": "sorted_window", "capacity": 100, "batches": 4},
    {"strategy": "concat_split", "tokens": 64},
    {"strategy": "fixed", "batch_size": 3},
    {"strategy": "capacity", "capacity": 45, "oversize": "own_batch"},
]
lengths_of = st.lists(st.integers(1, 60), min_size=1, max_size=120).map(np.array)


def entries(batches: MicroBatches) -> list[tuple[int, int, int]]:
    return sorted(zip(batches.sample.tolist(), batches.start.tolist(), batches.length.tolist(), strict=True))


@settings(deadline=None, max_examples=examples(150))
@given(lengths=lengths_of, document=st.sampled_from(DOCUMENTS), step=st.integers(1, 12))
def test_a_step_keeps_its_samples_and_nothing_gets_too_full(lengths: Any, document: dict[str, Any], step: int) -> None:
    strategy = strategy_from_dict(document)
    plan = strategy.plan(lengths)
    capacity = packing_capacity(strategy)
    whole = whole_steps(plan, step, capacity)
    assert len(whole) % step == 0 and 0 <= len(whole) - len(plan) < step
    for first in range(0, len(whole), step):
        before = whole.select(np.arange(first, first + step))
        after = even_step(before, capacity)
        assert len(after) == step
        old = plan.select(np.arange(first, min(first + step, len(plan))))
        assert entries(after) == entries(before) == entries(old)
        assert after.attention().tolist() == sorted(after.attention().tolist(), reverse=True)
        assert after.attention().max() <= before.attention().max()
        if capacity is not None:
            taken = [int(capacity.sizes(after.length[a:b]).sum()) for a, b in zip(after.offsets, after.offsets[1:])]  # noqa: B905
            alone = after.rows() == 1
            assert all(size <= capacity.limit or one for size, one in zip(taken, alone, strict=True))
        else:
            assert after.space().max() <= before.space().max() <= old.space().max()


def test_the_last_step_by_hand() -> None:
    plan = strategy_from_dict({"strategy": "fixed", "batch_size": 4}).plan(np.array([1, 1, 1, 1, 8, 2, 2, 2, 5]))
    assert [part.tolist() for part in whole_steps(plan, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8], []]
    assert [part.tolist() for part in whole_steps(plan, 5)] == [[0, 1, 2, 3], [4], [5], [6, 7], [8]]
    assert whole_steps(plan, 3) is plan and whole_steps(plan, 1) is plan
    whole = strategy_from_dict({"strategy": "fixed", "batch_size": 8}).plan(np.ones(8, dtype=np.int64))
    assert whole_steps(whole, 3).rows().tolist() == [2, 2, 4] and whole_steps(whole, 2).rows().tolist() == [4, 4]
    many = whole_steps(plan, 12)
    assert len(many) == 12 and many.rows().tolist() == [1] * 9 + [0] * 3
    assert many.longest().tolist() == [1, 1, 1, 1, 8, 2, 2, 2, 5, 0, 0, 0]


def test_packed_micro_batches_of_the_last_step_may_be_full() -> None:
    plan = strategy_from_dict({"strategy": "capacity", "capacity": 4, "unit": "packed_tokens"}).plan(
        np.array([4, 3, 1, 2, 2])
    )
    assert [part.tolist() for part in plan] == [[0], [1, 2], [3, 4]]
    assert [part.tolist() for part in whole_steps(plan, 4, Capacity(4))] == [[0], [1], [2, 3], [4]]


def test_copies_of_a_sample_in_a_step() -> None:
    """They go into different micro-batches of a last step; other steps keep their number of micro-batches."""
    strategy = strategy_from_dict({"strategy": "capacity", "capacity": 10, "unit": "packed_tokens"})
    last = whole_steps(strategy.plan(np.array([4, 3, 3])), 2, Capacity(10), np.array([0, 1, 1]))
    assert [part.tolist() for part in last] == [[0, 2], [1]]
    full = strategy.plan(np.array([5, 5, 10]))
    assert len(even_step(full, Capacity(10), np.array([0, 0, 1]))) == len(full) == 2


@pytest.mark.parametrize(("world", "turns"), [(1, 3), (2, 4), (5, 2)])
def test_each_turn_has_a_seat_for_each_rank(world: int, turns: int) -> None:
    for turn in range(turns):
        assert sorted(rank_slot(rank, world, turn) for rank in range(world)) == [*range(world)]
    assert {rank_slot(rank, world, 0) + rank_slot(rank, world, 1) for rank in range(world)} == {world - 1}, "evenly"


def test_the_last_step_of_packed_micro_batches_is_dealt_out_anew() -> None:
    """Nine micro-batches are a step of eight and one more, of which the eight ranks get an eighth each."""
    lengths = np.rint(np.exp(np.random.default_rng(1).normal(4, 0.5, 1000))).astype(np.int64)
    plan = strategy_from_dict({"strategy": "best_fit", "capacity": 7000}).plan(lengths)
    assert len(plan) % 8 == 1
    whole = whole_steps(plan, 8, Capacity(7000))
    tokens = even_step(whole.select(np.arange(len(plan) - 1, len(whole))), Capacity(7000)).tokens()
    assert len(tokens) == 8 and tokens.mean() > 0.97 * tokens.max()
