"""Steps: a constant number of micro-batches, the samples that they had, and as much work for each rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.batching.capacity import Capacity
from energon_lite.batching.metrics import even_balance, measure_plan
from energon_lite.batching.micro_batches import MicroBatches
from energon_lite.batching.steps import even_step, rank_slot, whole_steps
from energon_lite.batching.strategy import packing_capacity, strategy_from_dict

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
    assert measure_plan(many, ranks=12).token_balance == 23 / 12 / 8


@pytest.mark.parametrize(("world", "turns"), [(1, 3), (2, 4), (5, 2)])
def test_each_turn_has_a_seat_for_each_rank(world: int, turns: int) -> None:
    for turn in range(turns):
        assert sorted(rank_slot(rank, world, turn) for rank in range(world)) == [*range(world)]


@pytest.mark.parametrize("step", [8, 16, 22, 23, 64])
def test_ranks_have_as_much_to_do_whatever_their_number(step: int) -> None:
    """Lengths of a factor of ten; on the divisors of the step, and one of its own."""
    lengths = np.rint(np.exp(np.random.default_rng(0).normal(5.5, 0.6, 20_000))).astype(np.int64)
    strategy = strategy_from_dict({"strategy": "best_fit", "capacity": 6000, "oversize": "truncate"})
    plan = strategy.plan(lengths)
    for ranks in (rank for rank in (2, 8, 11, 23) if step % rank == 0):
        tokens, attention = even_balance(plan, Capacity(6000), ranks=ranks, per_rank=step // ranks, steps=10)
        assert tokens > 0.99 and attention > 0.9, (step, ranks)


def test_padded_micro_batches_are_dealt_to_and_fro() -> None:
    """Each has one length, so attention differs by a factor of ten; the more turns, the more of it evens out."""
    lengths = np.rint(np.exp(np.random.default_rng(0).normal(5.5, 0.6, 50_000))).astype(np.int64)
    plan = strategy_from_dict({"strategy": "sorted_window", "capacity": 6000, "batches": 300}).plan(lengths)
    for turns in (2, 4, 8):
        as_planned = plan.attention()[: len(plan) // (8 * turns) * 8 * turns].reshape(-1, turns, 8).sum(axis=1)
        before = float((as_planned.mean(axis=1) / as_planned.max(axis=1)).mean())
        tokens, attention = even_balance(plan, None, ranks=8, per_rank=turns)
        assert tokens > 0.97 and 1 - attention < (1 - before) * 0.7


def test_the_last_step_of_packed_micro_batches_is_dealt_out_anew() -> None:
    """Nine micro-batches are a step of eight and one more, of which the eight ranks get an eighth each."""
    lengths = np.rint(np.exp(np.random.default_rng(1).normal(4, 0.5, 1000))).astype(np.int64)
    plan = strategy_from_dict({"strategy": "best_fit", "capacity": 7000}).plan(lengths)
    assert len(plan) % 8 == 1
    whole = whole_steps(plan, 8, Capacity(7000))
    tokens = even_step(whole.select(np.arange(len(plan) - 1, len(whole))), Capacity(7000)).tokens()
    assert len(tokens) == 8 and tokens.mean() > 0.97 * tokens.max()
