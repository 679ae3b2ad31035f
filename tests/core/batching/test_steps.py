"""Steps: a constant number of micro-batches, the samples that they had, and as much work for each rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.batching.capacity import Capacity
from energon_lite.batching.micro_batches import MicroBatches
from energon_lite.batching.steps import even_step, rank_slot, whole_steps
from energon_lite.batching.strategy import packing_capacity, strategy_from_dict
from tests.testing import examples

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
    many = whole_steps(plan, 12)
    assert len(many) == 12 and many.rows().tolist() == [1] * 9 + [0] * 3
    assert many.longest().tolist() == [1, 1, 1, 1, 8, 2, 2, 2, 5, 0, 0, 0]


def test_packed_micro_batches_of_the_last_step_may_be_full() -> None:
    plan = strategy_from_dict({"strategy": "capacity", "capacity": 4, "unit": "packed_tokens"}).plan(
        np.array([4, 3, 1, 2, 2])
    )
    assert [part.tolist() for part in plan] == [[0], [1, 2], [3, 4]]
    assert [part.tolist() for part in whole_steps(plan, 4, Capacity(4))] == [[0], [1], [2, 3], [4]]


@pytest.mark.parametrize(("world", "turns"), [(1, 3), (2, 4), (5, 2)])
def test_each_turn_has_a_seat_for_each_rank(world: int, turns: int) -> None:
    for turn in range(turns):
        assert sorted(rank_slot(rank, world, turn) for rank in range(world)) == [*range(world)]


def test_the_last_step_of_packed_micro_batches_is_dealt_out_anew() -> None:
    """Nine micro-batches are a step of eight and one more, of which the eight ranks get an eighth each."""
    lengths = np.rint(np.exp(np.random.default_rng(1).normal(4, 0.5, 1000))).astype(np.int64)
    plan = strategy_from_dict({"strategy": "best_fit", "capacity": 7000}).plan(lengths)
    assert len(plan) % 8 == 1
    whole = whole_steps(plan, 8, Capacity(7000))
    tokens = even_step(whole.select(np.arange(len(plan) - 1, len(whole))), Capacity(7000)).tokens()
    assert len(tokens) == 8 and tokens.mean() > 0.97 * tokens.max()
