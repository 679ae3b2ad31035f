"""Samples dealt to the micro-batches of a step: nothing is lost, no limit is exceeded, and all costs are even.

Of each way of moving samples: what is kept of them stays true, and it makes steps more even.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from energon_lite.batching.capacity import Capacity, Ints
from energon_lite.batching.packing import BestFit
from energon_lite.extras.balance import even_costs as rebalancing
from energon_lite.extras.balance.cost_model import StepCosts
from energon_lite.extras.balance.even_costs import arrange_costs, even_costs, fit_limits, place_outsized
from energon_lite.extras.balance.movable_samples import MovableSamples
from energon_lite.extras.balance.rank_columns import UNIT, levels_of, shares_of
from energon_lite.order.hashing import mix64_array
from tests.testing import examples


def drawn(count: int, seed: int = 0) -> tuple[Ints, Ints, Ints]:
    """Tokens, images and costs of samples whose costs have little to do with their tokens."""
    rng = np.random.default_rng(seed)
    tokens = np.clip(np.rint(rng.lognormal(5, 0.8, count)), 4, 1500).astype(np.int64)
    images = rng.integers(0, 4, count)
    costs = np.stack([tokens**2, images * rng.integers(10, 4000, count) ** 2, (tokens * rng.random(count)).astype(int)])
    return tokens, images, costs


def packed(tokens: Ints, capacity: int, count: int) -> tuple[Ints, Ints]:
    """The samples of so many full micro-batches: which each is in, and which they are."""
    plan = BestFit(Capacity(capacity)).plan(tokens).select(np.arange(count))
    return np.repeat(np.arange(count), plan.rows()), plan.sample


def column_sums(rows: Ints, place: Ints, width: int) -> Any:
    return np.stack([np.bincount(place % width, weights=row, minlength=width) for row in rows])


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9), st.integers(0, 2**40)), min_size=1, max_size=120),
    st.integers(1, 12),
    st.integers(0, 9),
)
def test_nothing_is_lost_and_no_limit_is_exceeded(values: list[tuple[int, int, int]], more: int, images: int) -> None:
    tokens, shown, cost = (np.array(column, dtype=np.int64) for column in zip(*values, strict=True))
    plan = BestFit(Capacity(60)).plan(tokens)
    count = len(plan) + more - 1
    home = np.empty(len(tokens), dtype=np.int64)
    home[plan.sample] = np.repeat(np.arange(len(plan)), plan.rows())
    sizes, limits = np.stack([tokens, shown]), [60, max(9 * 60, images)]
    place = even_costs(np.stack([tokens**2, cost]), sizes, limits, home, count)
    assert place.shape == home.shape and place.min() >= 0 and place.max() < count
    assert np.bincount(place, weights=tokens, minlength=count).max() <= 60
    assert even_costs(np.stack([tokens**2, cost]), sizes, limits, home, count).tolist() == place.tolist()
    if np.bincount(home, minlength=count).min():
        assert np.bincount(place, minlength=count).min()
    crowded = fit_limits(sizes, [60, max(images, 1)], home, count)
    assert np.bincount(crowded, weights=tokens).max() <= 60
    many = np.bincount(crowded, weights=shown)
    assert all(total <= max(images, 1) or alone == 1 for total, alone in zip(many, np.bincount(crowded), strict=True))


@pytest.mark.parametrize("count", [48, 64])
def test_all_costs_are_even_whatever_the_number_of_ranks(count: int) -> None:
    tokens, images, costs = drawn(30_000)
    home, chosen = packed(tokens, 4000, count)
    rows, sizes = costs[:, chosen], np.stack([tokens[chosen], images[chosen]])
    place = even_costs(rows, sizes, [4000, 60], home, count)
    assert np.bincount(place, weights=sizes[0]).max() <= 4000 and np.bincount(place, weights=sizes[1]).max() <= 60
    for ranks in (width for width in levels_of(count) if 4 <= width <= count // 4):
        before, after = (column_sums(rows, one, ranks) for one in (home, place))
        assert (after.mean(axis=1) / after.max(axis=1)).min() > 0.95, ranks
        assert (before.mean(axis=1) / before.max(axis=1)).min() < 0.93, ranks


def test_a_sample_that_is_more_than_a_share_is_with_the_cheapest() -> None:
    """It makes one micro-batch cost what it does; nothing costly is beside it, or in its column."""
    tokens = np.array([100] * 64)
    cost = np.array([1000] + [10] * 20 + [0] * 43)
    home = np.arange(64) // 8
    place = even_costs(cost[None], tokens[None], [800], home, 8)
    loads = column_sums(cost[None], place, 8)[0]
    assert loads.max() == 1000
    assert column_sums(cost[None], place, 4)[0].max() == 1000


def test_steps_of_any_size_even_where_nothing_can_be_done() -> None:
    nothing = np.zeros((1, 3), dtype=np.int64)
    assert even_costs(nothing, nothing + 4, [4], np.arange(3), 3).tolist() == [0, 1, 2]
    assert even_costs(nothing + 1, nothing + 4, [4], np.array([0, 0, 0]), 1).tolist() == [0, 0, 0]
    assert arrange_costs(np.zeros((2, 4), dtype=np.int64)).tolist() == [0, 1, 2, 3]
    assert levels_of(7) == (7,) and levels_of(1) == (1,) and levels_of(128) == (128, 64, 32, 16, 8, 4, 2)


@given(st.lists(st.integers(0, 2**45), min_size=8, max_size=8), st.integers(1, 4))
def test_whole_micro_batches_have_a_place_each(values: list[int], rows: int) -> None:
    costs = np.stack([np.roll(np.array(values, dtype=np.int64), row) for row in range(rows)])
    assert sorted(arrange_costs(costs).tolist()) == list(range(8))


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9), st.integers(0, 2**30)), min_size=8, max_size=120),
    st.sampled_from([7, 16, 24, 32, 60, 96]),
    st.lists(st.tuples(st.integers(30, 60), st.integers(28, 36)), max_size=6),
)
def test_what_is_beside_outsized_samples_fits(
    values: list[tuple[int, int, int]], count: int, long: list[tuple[int, int]]
) -> None:
    values = [*values, *((tokens, 1, 2**bits) for tokens, bits in long)]
    tokens, images, cost = (np.array(column, dtype=np.int64) for column in zip(*values, strict=True))
    sizes, limits = np.stack([tokens, images]), np.array([60, 20])
    shares = shares_of(np.stack([tokens**2, cost]), count)
    place = place_outsized(shares, sizes, limits, count)
    assert place.shape == tokens.shape and place.min() >= -1 and place.max() < count
    for row, limit in zip(sizes, limits, strict=True):
        assert np.bincount(place[place >= 0], weights=row[place >= 0], minlength=count).max() <= limit
    assert len(np.unique(place[place >= 0])) * 4 <= count
    smallest = min((count // width for width in levels_of(count) if width < count), default=count)
    if shares.max() < 12 * UNIT * smallest // 16:
        assert (place < 0).all()


def test_where_there_is_room_nothing_need_be_beside_an_outsized_sample() -> None:
    lengths = np.array([8] * 30 + [16] + [1] * 40)
    place = place_outsized(shares_of(lengths[None] ** 2, 24), lengths[None], np.array([32]), 24)
    assert place.tolist() == [-1] * 30 + [0] + [-1] * 40
    even = even_costs(lengths[None] ** 2, lengths[None], [32], np.arange(71) % 24, 24)
    loads = column_sums(lengths[None], even, 8)[0]
    assert loads[even[30] % 8] <= loads.max() and np.bincount(even, weights=lengths).max() <= 32


@settings(deadline=None, max_examples=examples(15))
@given(st.integers(0, 10**6), st.floats(1.2, 4.0))
def test_no_filling_would_cost_much_less(seed: int, loss_of_short: float) -> None:
    """Compared with a linear program, which may cut samples. Short ones have more loss tokens, of which the rank should
    have little more than its share."""
    rng = np.random.default_rng(seed)
    tokens = np.clip(np.rint(rng.lognormal(6, 1, 2000)), 16, 4000).astype(np.int64)
    tokens[0] = 8000
    loss = np.where(tokens < 400, tokens * loss_of_short, tokens).astype(np.int64)
    count, turns = 64, 4
    limit = int(tokens.sum() // count) + 100
    rows = np.stack([np.where(tokens == 8000, 5 * (tokens**2).sum() // count, tokens**2), loss])
    shares = shares_of(rows, count)
    place = place_outsized(shares, tokens[None], np.array([max(limit, 8000)]), count)
    mine = (place >= 0) & (place % (count // turns) == 0)
    share = turns * UNIT
    attention, counted = shares[:, mine].sum(axis=1) / share
    bounds = np.array([[0, 1]] * len(tokens) + [[0, 9]])
    bounds[0, 0] = 1
    above = np.append(np.stack([-tokens, shares[1] / share]), [[0], [-1]], axis=1)
    least = linprog([*(shares[0] / share), 4], above, [-tokens[mine].sum(), 1 + 1 / 64], bounds=bounds)
    assert place[0] == 0 and tokens[mine].sum() > 0.99 * turns * max(limit, 8000) and least.success
    assert attention + 4 * max(0, counted - 1 - 1 / 64) < least.fun + 0.03


def test_a_rank_with_an_outsized_sample_has_the_least_beside_it() -> None:
    """Micro-batches are full, so its rank has as many tokens as all: the shortest, but not more loss than its share."""
    rng = np.random.default_rng(3)
    tokens = np.clip(np.rint(rng.lognormal(6.5, 1, 12_000)), 16, 5000).astype(np.int64)
    tokens[0] = 16_000
    loss = np.where(tokens < 400, tokens, tokens // 3)  # what is short is all loss
    count, ranks = 128, 32
    home, chosen = packed(tokens, 16_384, count)
    rows, sizes = np.stack([tokens[chosen] ** 2, loss[chosen]]), tokens[None, chosen]
    place = even_costs(rows, sizes, [16_384], home, count)
    attention, counted = column_sums(rows, place, ranks)
    rank = int(place[chosen == 0][0]) % ranks
    share = float(attention.mean())
    assert 1.1 * share < 16_000**2
    # With its part of everything beside it, that would be 3 / 4 of a share more.
    assert attention.max() == attention[rank] < 16_000**2 + 0.18 * share
    assert counted.max() < 1.05 * counted.mean()


@pytest.mark.parametrize(
    ("count", "capacity", "most", "outsized", "copies", "together", "digest"),
    [
        (24, Capacity(2000), 16, 0, 1, 256, "f3a3d5b4"),
        (48, Capacity(2600, multiple=8), 20, 1, 1, 256, "d841484f"),
        (96, Capacity(2000), 20, 2, 9, 256, "11b5a068"),
        (110, Capacity(2050), 20, 1, 1, 10, "678cf9dd"),
        (14, Capacity(2000), 16, 0, 40, 256, "b1771bc6"),
    ],
)
def test_golden(
    count: int, capacity: Capacity, most: int, outsized: int, copies: int, together: int, digest: str, monkeypatch: Any
) -> None:
    """Values for ever: what saved runs are planned by. If this changes, so must PLAN_VERSION."""
    monkeypatch.setattr(rebalancing, "_TOGETHER", together)
    a, b, c, d, e = (mix64_array(np.arange(5000, dtype=np.uint64)).astype(np.int64) >> 1).reshape(5, 1000)
    tokens, images = (2 + a % 33) * (2 + b % 33), c % 4
    plan = BestFit(Capacity(2000)).plan(tokens)
    step, rows = plan.select(np.arange(count)), np.stack([images * (d % 4000) ** 2, tokens * (e % 100) // 100])
    rows[0, step.sample[:outsized]] = np.arange(4, 4 + outsized) * rows[0, step.sample].sum() // count
    costs, sample = StepCosts(rows, tokens, images, most), np.arange(1000) // copies if copies > 1 else None
    made = [costs.even(step, capacity, sample), costs.even(replace(step, packed=False), capacity, sample)]
    made.append(replace(costs, max_images=most // 2).within_limits(plan, Capacity(2000), (0, 500)))
    assert hashlib.sha256("".join(one.digest() for one in made).encode()).hexdigest()[:8] == digest


# -- each way of moving samples by itself ------------------------------------------------------------------------------


LIMIT = 2000


def movable(count: int, seed: int, *, full: int | None = LIMIT) -> MovableSamples:
    """Micro-batches with so many tokens of samples with two costs; None: each sample is anywhere, may it fit or not."""
    rng = np.random.default_rng(seed)
    tokens = np.clip(np.rint(rng.lognormal(5, 0.8, 60 * count)), 4, 1500).astype(np.int64)
    other = rng.integers(0, 1000, len(tokens))
    if full:
        place, chosen = packed(tokens, full, count)
    else:
        chosen = np.flatnonzero(np.cumsum(tokens) < 0.8 * LIMIT * count)
        place = rng.integers(0, count, len(chosen))
    costs = np.stack([tokens[chosen] ** 2, other[chosen]])
    return MovableSamples(shares_of(costs, count), tokens[None, chosen], np.array([LIMIT]), place, count)


def unevenness(bins: MovableSamples) -> float:
    """What exchanges make smaller: the squared deviations of columns, each level and row with its weight."""
    total = 0.0
    for width, weight in zip(bins.columns.levels, bins.columns.weights, strict=True):
        sums = bins.loads.reshape(len(bins.loads), -1, width).sum(axis=1) / UNIT
        total += float(((sums - sums.mean(axis=1, keepdims=True)) ** 2).sum(axis=1) @ weight)
    return total


def assert_true(bins: MovableSamples, before: Ints) -> None:
    """What is kept beside the samples is that of the samples, and there are as many of each."""
    place = bins.place()
    assert sorted(bins.table[bins.table != bins.none].tolist()) == list(range(len(before)))
    for kept, rows in ((bins.loads, bins.shares), (bins.held, bins.sizes)):
        found = [np.bincount(place, weights=row[:-1], minlength=bins.count) for row in rows]
        assert np.array_equal(kept, np.stack(found).astype(np.int64))
    assert np.array_equal(bins.pull, bins.columns.pulls(bins.loads))
    assert bins.filled.tolist() == np.bincount(place, minlength=bins.count).tolist()


@settings(deadline=None, max_examples=examples(30))
@given(st.integers(2, 24), st.integers(0, 10**6), st.sampled_from([LIMIT, 1600, None]), st.data())
def test_what_is_kept_stays_true(count: int, seed: int, full: int | None, data: st.DataObject) -> None:
    bins = movable(count, seed, full=full)
    place, nothing = bins.place(), np.full(bins.none, -1)
    for turn in data.draw(st.lists(st.integers(0, 9), max_size=6)):
        over = int(np.maximum(bins.held - LIMIT, 0).sum())
        uneven = unevenness(bins)
        kind = data.draw(st.sampled_from(["singles", "trade", "finish", "mend"]))
        if kind == "singles":
            bins.exchange_singles(turn)
        elif kind == "trade":
            bins.trade(turn, pairs=max(1, count // 2), considered=8)
        elif kind == "finish":
            bins.finish(turn, nothing)
        else:
            bins.mend()
        now = int(np.maximum(bins.held - LIMIT, 0).sum())
        assert now <= over
        if now == over and kind in ("singles", "trade"):
            assert unevenness(bins) <= uneven * (1 + 1e-12)
    assert_true(bins, place)


def test_single_samples_change_places_until_columns_are_even() -> None:
    bins = movable(48, 0, full=1600)
    before = unevenness(bins)
    for turn in range(6):
        bins.exchange_singles(turn)
    assert unevenness(bins) < 0.35 * before
    for turn in range(6, 30):
        bins.exchange_singles(turn)
    assert unevenness(bins) < 0.2 * before


def test_trades_find_what_single_samples_do_not() -> None:
    bins = movable(48, 1)
    for turn in range(30):
        bins.exchange_singles(turn)
    before = unevenness(bins)
    for turn in range(10):
        bins.trade(turn, pairs=8, considered=12)
    assert unevenness(bins) < 0.6 * before


@pytest.mark.parametrize("seed", range(5))
def test_trades_alone_mend_what_is_too_full(seed: int) -> None:
    bins = movable(16, seed, full=None)
    while (bins.held > LIMIT).any():
        over = int(np.maximum(bins.held - LIMIT, 0).sum())
        bins.mend()
        assert int(np.maximum(bins.held - LIMIT, 0).sum()) < over
