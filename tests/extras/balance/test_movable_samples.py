"""Each way of moving samples by itself: what is kept of them stays true, and each makes steps more even."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.batching.capacity import Capacity, Ints
from energon_lite.batching.packing import BestFit
from energon_lite.extras.balance.movable_samples import MovableSamples
from energon_lite.extras.balance.rank_columns import UNIT, shares_of
from tests.testing import examples

LIMIT = 2000


def movable(count: int, seed: int, *, packed: int | None = LIMIT) -> MovableSamples:
    """Micro-batches with so many tokens of samples with two costs; None: each sample is anywhere, may it fit or not."""
    rng = np.random.default_rng(seed)
    tokens = np.clip(np.rint(rng.lognormal(5, 0.8, 60 * count)), 4, 1500).astype(np.int64)
    other = rng.integers(0, 1000, len(tokens))
    if packed:
        plan = BestFit(Capacity(packed)).plan(tokens).select(np.arange(count))
        chosen, place = plan.sample, np.repeat(np.arange(count), plan.rows())
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


def worst(bins: MovableSamples, width: int) -> float:
    sums = bins.loads.reshape(len(bins.loads), -1, width).sum(axis=1)
    return float((sums.max(axis=1) / sums.mean(axis=1)).max())


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
def test_what_is_kept_stays_true(count: int, seed: int, packed: int | None, data: st.DataObject) -> None:
    bins = movable(count, seed, packed=packed)
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
    bins = movable(48, 0, packed=1600)
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


@pytest.mark.parametrize("seed", range(4))
def test_the_worst_columns_become_better(seed: int) -> None:
    bins = movable(48, seed)
    for turn in range(30):
        bins.exchange_singles(turn)
    before = {width: worst(bins, width) for width in bins.columns.levels}
    bins.finish(48, np.full(bins.none, -1))
    after = {width: worst(bins, width) for width in bins.columns.levels}
    assert sum(after.values()) < sum(before.values()) - 1
    assert all(after[width] < 1.02 for width in before if width <= 3)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_too_full_is_mended_at_any_price(seed: int) -> None:
    bins = movable(32, seed, packed=None)
    assert (bins.held > LIMIT).any()
    for turn in range(16):
        bins.exchange_singles(turn)
    assert bins.mend() and (bins.held <= LIMIT).all()


@pytest.mark.parametrize("seed", range(5))
def test_trades_alone_mend_what_is_too_full(seed: int) -> None:
    bins = movable(16, seed, packed=None)
    while (bins.held > LIMIT).any():
        over = int(np.maximum(bins.held - LIMIT, 0).sum())
        bins.mend()
        assert int(np.maximum(bins.held - LIMIT, 0).sum()) < over
