"""The numbers of a plan, against plans of which they are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.batching.capacity import Capacity
from energon_lite.batching.micro_batches import MicroBatches
from energon_lite.batching.steps import whole_steps
from energon_lite.batching.strategy import strategy_from_dict
from energon_lite.extras.inspect.planning import (
    even_balance,
    lateness,
    length_correlation,
    mean_balance,
    measure_plan,
    rank_loads,
)
from tests.testing import examples


def planned(lengths: Any, strategy: str, **settings: Any) -> MicroBatches:
    return strategy_from_dict({"strategy": strategy, **settings}).plan(np.asarray(lengths))


def drawn(mean: float, spread: float, count: int) -> Any:
    """Lengths as those of documents, below 4,000."""
    return np.rint(np.minimum(np.exp(np.random.default_rng(0).normal(mean, spread, count)), 4000)).astype(np.int64)


def test_by_hand() -> None:
    batches = planned([1, 1, 1, 2, 2, 5, 5], "capacity", capacity=10)
    found = measure_plan(batches, ranks=2)
    assert (found.micro_batches, found.steps) == (2, 1)
    assert found.fill == 17 / 20 and found.padding_efficiency == 17 / 20 and found.over == 0
    assert tuple(map(mean_balance, rank_loads(batches, ranks=2))) == (1.0, (20 + 50) / 2 / 50)  # both take up 10 tokens
    assert found.lateness == 0
    # Weights 1/5 for five samples, 1/2 for two: (1 + 1)^2 / (7 * (1/5 + 1/2)).
    assert found.effective_samples == pytest.approx(4 / (7 * 0.7))


def test_over_the_capacity() -> None:
    assert measure_plan(planned([20, 5, 5, 10, 10], "best_fit", capacity=10, oversize="own_batch")).over == 0.25


def test_correlation_of_lengths_and_variance_of_steps() -> None:
    lengths = drawn(5, 0.7, 20_000)
    plain, like = (measure_plan(planned(lengths, "fixed", batch_size=10, sort=sort)) for sort in (False, True))
    assert abs(plain.length_correlation) < 0.02 and 0.8 < plain.step_variance_ratio < 1.2
    assert like.length_correlation > 0.99
    assert like.step_variance_ratio == pytest.approx(80, rel=0.05)  # all 80 samples of a step are of one length
    # Each micro-batch has the same two lengths: less alike than chance would have it.
    assert length_correlation(planned(np.tile([1, 100], 50), "fixed", batch_size=2)) == pytest.approx(-1)
    assert length_correlation(planned(np.full(9, 4), "fixed", batch_size=2)) == 0
    assert length_correlation(planned([2, 2, 8], "fixed", batch_size=2)) == pytest.approx(1)
    for length in range(1, 40):  # no rounding of logarithms counts
        equal = measure_plan(planned(np.full(80, length), "fixed", batch_size=5), ranks=8)
        assert (equal.length_correlation, equal.step_variance_ratio) == (0, 1)


@given(st.lists(st.lists(st.integers(1, 999), max_size=4), min_size=1, max_size=8))
def test_micro_batches_without_samples_change_no_correlation(groups: list[list[int]]) -> None:
    """Steps that are evened out have some, where samples are few."""
    lengths = np.array([length for group in groups for length in group], dtype=np.int64)
    whole = MicroBatches.of([np.arange(len(lengths))] if len(lengths) else [], lengths, packed=False)
    batches = whole.regrouped(np.arange(len(lengths)), [len(group) for group in groups])
    without = whole.regrouped(np.arange(len(lengths)), [len(group) for group in groups if group])
    assert length_correlation(batches) == pytest.approx(length_correlation(without))


def test_lateness() -> None:
    batches = MicroBatches(
        np.array([1, 0, 2]), np.zeros(3, dtype=np.int64), np.ones(3, dtype=np.int64), np.array([0, 2, 3]), True
    )
    assert lateness(batches).tolist() == [-1, 1, 0]


def test_loads_of_ranks() -> None:
    batches = planned([4, 3, 2, 1, 9], "fixed", batch_size=1)
    tokens, squares = rank_loads(batches, ranks=2)
    assert tokens.tolist() == [[4, 3], [2, 1]] and squares.tolist() == [[16, 9], [4, 1]]
    tokens, _ = rank_loads(batches, ranks=2, per_rank=2)
    assert tokens.tolist() == [[5, 5]]


def test_balance_of_steps_that_are_evened_out() -> None:
    batches = planned([8, 8, 4, 4, 4, 4], "capacity", capacity=16, unit="packed_tokens")
    assert mean_balance(rank_loads(batches, ranks=2)[1]) == 0.75
    assert even_balance(batches, Capacity(16), ranks=2) == (1.0, 1.0)
    assert even_balance(batches, None, ranks=2) == (1.0, 0.75)  # nothing is exchanged


@pytest.mark.parametrize("step", [8, 16, 22, 23, 64])
def test_ranks_have_as_much_to_do_whatever_their_number(step: int) -> None:
    """Lengths of a factor of ten; on the divisors of the step, and one of its own."""
    plan = planned(drawn(5.5, 0.6, 20_000), "best_fit", capacity=6000, oversize="truncate")
    for ranks in (rank for rank in (2, 8, 11, 23) if step % rank == 0):
        tokens, attention = even_balance(plan, Capacity(6000), ranks=ranks, per_rank=step // ranks, steps=10)
        assert tokens > 0.99 and attention > 0.9, (step, ranks)


def test_padded_micro_batches_are_dealt_to_and_fro() -> None:
    """Each has one length, so attention differs by a factor of ten; the more turns, the more of it evens out."""
    plan = planned(drawn(5.5, 0.6, 50_000), "sorted_window", capacity=6000, batches=300)
    for turns in (2, 4, 8):
        as_planned = plan.attention()[: len(plan) // (8 * turns) * 8 * turns].reshape(-1, turns, 8).sum(axis=1)
        before = float((as_planned.mean(axis=1) / as_planned.max(axis=1)).mean())
        tokens, attention = even_balance(plan, None, ranks=8, per_rank=turns)
        assert tokens > 0.97 and 1 - attention < (1 - before) * 0.7


@settings(max_examples=examples(12))
@given(st.floats(0.3, 1.0), st.sampled_from([5, 8, 15, 40]), st.integers(0, 99))
def test_best_fit_brings_lengths_together_as_chance_does(spread: float, fill: int, seed: int) -> None:
    """Neither like with like, as sorting does, nor long with short, as packing does by itself; and yet full."""
    lengths = np.random.default_rng(seed).lognormal(6, spread, 30_000).astype(np.int64) + 1
    capacity = fill * int(lengths.mean())
    plan = planned(lengths, "best_fit", capacity=capacity, oversize="drop")
    found = measure_plan(plan, ranks=8)
    assert abs(found.length_correlation) < 0.02
    assert found.fill > (0.99 if fill >= 15 else 0.97)


def test_balance_with_ranks_that_have_no_sample() -> None:
    plan = planned([1, 1, 1, 1, 8, 2, 2, 2, 5], "fixed", batch_size=4)
    assert mean_balance(rank_loads(whole_steps(plan, 12), ranks=12)[0]) == 23 / 12 / 8
