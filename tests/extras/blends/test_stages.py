"""Blends with stages: within one sample of the integral, streams without gaps, and a past that no future changes; and
runs of them."""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import UsageError
from energon_lite.extras.blends.staged_run import Stages, stages_from
from energon_lite.extras.blends.stages import Ideal, ShareIntegral, StagedBlend, last_position
from energon_lite.extras.blends.stages import WeightStage as Stage
from energon_lite.extras.tools.order_arrays import build_blend_index
from energon_lite.loading.iterators.dataset import LeafIdentity
from energon_lite.order.blend import BLOCK, Blend, integer_shares
from energon_lite.order.orders import BlendOrder, LeafBlend, Rebase
from energon_lite.order.shuffle import LeafOrder
from tests.core.order import test_rebase as rebase

RAMP = (Stage(0, (0.9, 0.1), last=(0.1, 0.9)), Stage(10**6, (0.1, 0.9)))

weight = st.one_of(st.floats(1e-9, 1.0), st.floats(0.1, 1.0), st.integers(1, 10).map(float))
lengths = st.one_of(st.integers(1, 3), st.integers(1, 9000), st.integers(1, 3).map(lambda blocks: blocks * BLOCK))


@st.composite
def staged(draw: st.DrawFn) -> tuple[Stage, ...]:
    """Stages in which each leaf comes in once and leaves once, or stays all the time; the first one always stays."""
    count, number = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    there = [(0, number)] + [
        sorted((draw(st.integers(0, number)), draw(st.integers(0, number)))) for _ in range(count - 1)
    ]

    def weights(stage: int) -> tuple[float, ...]:
        return tuple(draw(weight) if first <= stage <= last else 0.0 for first, last in there)

    starts = np.cumsum([0, *(draw(lengths) for _ in range(number))]).tolist()
    return tuple(
        Stage(start, weights(stage), weights(stage) if stage < number and draw(st.booleans()) else None)
        for stage, start in enumerate(starts)
    )


def integrals(stages: tuple[Stage, ...], position: int) -> list[Fraction]:
    """By fractions, from the definition."""
    total = [Fraction(0)] * len(stages[0].weights)
    for stage, stop in zip(stages, [*(following.start for following in stages[1:]), None], strict=True):
        if stage.start >= position:
            break
        x = min(position, position if stop is None else stop) - stage.start
        a, b = (
            [Fraction(one) / sum(map(Fraction, weights)) for one in weights]
            for weights in (stage.weights, stage.last or stage.weights)
        )
        bend = Fraction(0) if stop is None else Fraction(x * x, 2 * (stop - stage.start))
        total = [done + one * x + (other - one) * bend for done, one, other in zip(total, a, b, strict=True)]
    return total


def error(counts: np.ndarray, expected: list[Fraction]) -> float:
    return max(abs(float(int(count) - value)) for count, value in zip(counts, expected, strict=True))


# -- counts ---------------------------------------------------------------------------------------------------------


@given(stages=staged(), key=st.integers(0, 2**64 - 1))
def test_counts_follow_the_integral_and_streams_go_on(stages: tuple[Stage, ...], key: int) -> None:
    end = stages[-1].start + 2 * BLOCK + 5
    leaf, position = StagedBlend(stages, key).lookup(np.arange(end))
    leaves = len(stages[0].weights)
    for number in range(leaves):
        assert np.array_equal(position[leaf == number], np.arange(np.count_nonzero(leaf == number)))
    for edge in {*range(0, end, BLOCK), *(stage.start for stage in stages)}:
        assert error(np.bincount(leaf[:edge], minlength=leaves), integrals(stages, edge)) <= 1
    for stage, stop in zip(stages, [*(following.start for following in stages[1:]), end], strict=True):
        there = np.bincount(leaf[stage.start : stop], minlength=leaves)
        shares = np.array([stage.weights, stage.last or stage.weights])
        assert not there[~shares.any(axis=0)].any()


@given(stages=staged(), data=st.data())
def test_leaves_that_come_and_go_at_will(stages: tuple[Stage, ...], data: st.DataObject) -> None:
    """What those who are away should have had is a fraction for each of them; the others cannot make up for it."""
    leaves = len(stages[0].weights)
    flags = st.lists(st.booleans(), min_size=leaves, max_size=leaves)
    stages = tuple(
        Stage(stage.start, tuple(w * on for w, on in zip(stage.weights, data.draw(flags), strict=True)), stage.last)
        for stage in stages
    )
    stages = tuple(stage if any(stage.weights) else Stage(stage.start, (1.0,) * leaves, stage.last) for stage in stages)
    blend = StagedBlend(stages, key=2)
    for edge in [*range(0, stages[-1].start + BLOCK, BLOCK), stages[-1].start + 10**9 // BLOCK * BLOCK]:
        assert error(blend.counts_before(edge), integrals(stages, edge)) <= 2


@pytest.mark.parametrize("count", [2, 1000, 5000])
def test_many_leaves_over_nine_orders_of_magnitude_far_out(count: int) -> None:
    rng = np.random.default_rng(count)
    one, other, third = (tuple((10 ** rng.uniform(-9, 0, count)).tolist()) for _ in range(3))
    blend = StagedBlend((Stage(0, one), Stage(10**6 + 7, one, other), Stage(10**15 + 3, third)), key=2)
    ends = [place // BLOCK * BLOCK for place in (BLOCK, 10**12, 10**15, 10**16)]
    for position in (*ends, 10**6 + 7, 10**15 + 3):
        counts, ideal = blend.counts_before(position), blend.ideal_before(position)
        assert int(counts.sum()) == position
        assert np.abs((counts - ideal.whole) - ideal.fraction * 2.0**-62).max() <= 1
    if count == 2:  # the ideal itself; shares are rounded to 2**-62
        assert error(blend.ideal_before(10**15).whole, integrals(blend._stages, 10**15)) <= 1.001


# -- the same, however it is asked for ------------------------------------------------------------------------------


def agree(one: LeafBlend, other: LeafBlend, positions: np.ndarray) -> bool:
    """Whether two blends have the same there."""
    return np.array_equal(one.lookup(positions), other.lookup(positions))


@given(stages=staged(), data=st.data())
def test_random_access(stages: tuple[Stage, ...], data: st.DataObject) -> None:
    end = stages[-1].start + BLOCK
    used = StagedBlend(stages, key=4)
    leaf, position = used.lookup(np.arange(end))
    wanted = np.array(data.draw(st.lists(st.integers(0, end - 1), min_size=1, max_size=30)))
    for blend in (used, StagedBlend(stages, key=4)):
        assert np.array_equal(blend.lookup(wanted), (leaf[wanted], position[wanted]))
    at = int(wanted[0])
    assert np.array_equal(used.counts_before(at), np.bincount(leaf[:at], minlength=len(stages[0].weights)))


@given(weights=st.lists(st.floats(1e-9, 1.0), min_size=2, max_size=12), start=st.integers(0, 2**61))
def test_a_single_stage_is_a_plain_blend(weights: list[float], start: int) -> None:
    assert agree(Blend(weights, key=5), StagedBlend([Stage(0, tuple(weights))], key=5), start + np.arange(3000))


@given(stages=staged(), future=staged(), data=st.data())
def test_the_future_does_not_change_the_past(
    stages: tuple[Stage, ...], future: tuple[Stage, ...], data: st.DataObject
) -> None:
    """Stages from some place on are replaced; then the last constant one is cut off somewhere."""
    leaves, keep = len(stages[0].weights), data.draw(st.integers(1, len(stages)))
    cut = stages[keep].start if keep < len(stages) else stages[-1].start + data.draw(st.integers(1, 3 * BLOCK))
    fitted = [[w and (*w, *([1.0] * leaves))[:leaves] for w in (stage.weights, stage.last)] for stage in future]
    tail = [Stage(cut + stage.start, *weights) for stage, weights in zip(future, fitted, strict=True)]
    tail = [s if any(s.weights) and any(s.last or [1]) else Stage(s.start, (1.0,) * leaves) for s in tail]
    tail[-1] = Stage(tail[-1].start, tail[-1].weights)
    edited = StagedBlend((*stages[:keep], *tail), key=6)
    assert agree(StagedBlend(stages, key=6), edited, np.arange(last_position(cut)))


def test_all_positions_before_a_stage_stay_when_it_is_edited() -> None:
    """The stage began there before, too, and nobody leaves: then up to its very first position."""
    before, edited = (
        StagedBlend((Stage(0, (3, 1, 2), last=(1, 1, 1)), Stage(10_000, weights)), key=7)
        for weights in ((1, 1, 1), (5, 1, 1e-6))
    )
    assert agree(before, edited, np.arange(10_000))


def test_in_an_order() -> None:
    leaves = [LeafOrder(1000, key=1), LeafOrder(70, key=2)]
    order = BlendOrder(leaves, Stages(RAMP), key=3)
    found = order.lookup(np.arange(990_000, 1_010_000))
    assert abs(np.bincount(found.leaf)[1] - 18_000) < 100
    seconds = np.flatnonzero(found.leaf == 1)[:140]
    assert len({(int(found.index[i]), int(found.epoch[i])) for i in seconds}) == 140
    assert BlendOrder(leaves[:1], Stages((Stage(0, (3.0,)),)), key=3).blend is None


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "a blend without a stage"),
        ([Stage(5, (1, 1))], "the first stage starts at 5"),
        ([Stage(0, (1, 1)), Stage(0, (1, 1))], "a stage that starts at 0 after one that starts at 0"),
        ([Stage(0, (1, 1)), Stage(9, (1, 1)), Stage(4, (1, 1))], "a stage that starts at 4 after one that starts at 9"),
        ([Stage(0, (1, 1)), Stage(2**62, (1, 1))], "a stage starts at 4611686018427387904"),
        ([Stage(0, (1, 1), (1, 2))], "never ends"),
        ([Stage(0, (1, 1)), Stage(9, (1,))], "2 leaves, but 1 weights in the stage from 9 on"),
        ([Stage(0, (1, 1), (1,)), Stage(9, (1, 1))], "2 leaves, but 1 weights in the stage from 0 on"),
        ([Stage(0, (1, 1)), Stage(9, (0, 0))], "all weights are zero in the stage from 9 on"),
        ([Stage(0, (1, -1))], "weight 1 of the stage from 0 on is -1"),
        ([Stage(0, (1, 1)), Stage(9, (1, float("nan")))], "weight 1 of the stage from 9 on is nan"),
    ],
)
def test_bad_stages_are_named(stages: list[Stage], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        StagedBlend(stages, key=0)
    assert caught.value.fix


def test_more_positions_or_other_leaves_than_there_are() -> None:
    with pytest.raises(UsageError, match="the order ends before this position"):
        StagedBlend(RAMP, key=0).lookup(np.array([2**62]))
    with pytest.raises(UsageError, match="2 leaves, but 3 weights"):
        BlendOrder([LeafOrder(4, key=1)] * 2, Stages((Stage(0, (1, 1, 1)),)), key=0)


def test_golden() -> None:
    """Values for ever. If this changes, so must ORDER_VERSION."""
    stages = (Stage(0, (5, 3, 0)), Stage(5000, (1, 1, 0), (0, 1, 1)), Stage(10**15, (0.2, 0.3, 0.5)))
    positions = np.r_[np.arange(9000), 10**9 + np.arange(9000), 10**15 - 4000 + np.arange(9000)]
    found = np.stack(StagedBlend(stages, 42).lookup(positions)).astype("<i8")
    assert hashlib.sha256(found.tobytes()).hexdigest()[:16] == "27be26863bd62b1d"


# -- integrals of shares in fixed point: exact, beside fractions of unlimited length ----------------------------------


shares_at_once = st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1.0)), min_size=1, max_size=6).filter(any)


def exact(ideal: Ideal) -> list[Fraction]:
    return [
        Fraction(whole) + Fraction(fraction, 1 << 62)
        for whole, fraction in zip(ideal.whole.tolist(), ideal.fraction.tolist(), strict=True)
    ]


@given(first=shares_at_once, data=st.data(), start=st.integers(0, 2**50), length=st.integers(1, 2**61))
def test_the_integral_of_a_straight_line(first: list[float], data: st.DataObject, start: int, length: int) -> None:
    last = data.draw(st.lists(st.floats(0, 1), min_size=len(first), max_size=len(first)).filter(any))
    one, other = (integer_shares(values, zero=True) for values in (first, last))
    base = Ideal(np.arange(len(first)), np.full(len(first), 3 << 60, dtype=np.uint64))
    x = data.draw(st.integers(0, length))
    found = exact(ShareIntegral(start, base, one, other, length).before(start + x))
    for leaf, value in enumerate(found):
        a, b = Fraction(int(one[leaf]), 1 << 62), Fraction(int(other[leaf]), 1 << 62)
        integral = leaf + Fraction(3, 4) + a * x + (b - a) * x * x / (2 * length)
        assert abs(value - integral) < Fraction(1, 1 << 30)
    total = sum(range(len(first))) + Fraction(3, 4) * len(first) + x
    assert abs(sum(found) - total) < Fraction(1, 1 << 50)  # whatever was rounded: nothing is created or lost


def test_sums_are_rounded_to_the_nearest() -> None:
    quarters = Ideal(np.array([1, 2, 3]), np.full(3, 1 << 60, dtype=np.uint64))
    assert [quarters.total(np.arange(3) < count) for count in (1, 2, 3)] == [1, 4, 7]


# -- runs whose weights change: rebases and arrays of their order -----------------------------------------------------


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[int], BlendOrder]:
    """Some of the leaves, in any order, and an order that mixes them by weights that change."""
    leaves = draw(st.permutations(range(len(rebase.LENGTHS))))[: draw(st.integers(1, len(rebase.LENGTHS)))]
    one_each: Any = st.lists(rebase.weights, min_size=len(leaves), max_size=len(leaves))
    first, second, third = (tuple(draw(one_each)) for _ in range(3))
    begin = draw(st.integers(1, 9000))
    stages = Stage(0, first, last=second), Stage(begin, second), Stage(begin + 4096, third)
    return leaves, BlendOrder([rebase.leaf_order(leaf) for leaf in leaves], Stages(stages), key=1)


def of_core(law: Any) -> Any:
    """A law of rebases, to be tried on runs in stages."""
    return law.hypothesis.inner_test


some = st.lists(st.tuples(st.one_of(runs(), runs(), rebase.recipes()), st.integers(0, 6000)), min_size=1, max_size=4)


@given(chain=some)
def test_each_leafs_stream_has_no_gap_and_no_repetition(chain: Any) -> None:
    of_core(rebase.test_each_leafs_stream_has_no_gap_and_no_repetition)(chain)


@given(recipe=runs(), position=st.one_of(st.integers(0, 20_000), st.integers(0, 2**55)), span=st.integers(1, 100))
def test_far_out_too_and_at_random(recipe: Any, position: int, span: int) -> None:
    of_core(rebase.test_far_out_too_and_at_random)(recipe, position, span)
    leaves, order = recipe
    found = order.lookup(np.arange(position % 20_000)).leaf
    assert order.counts_before(len(found)).tolist() == np.bincount(found, minlength=len(leaves)).tolist()


def test_a_stage_keeps_its_place_in_the_run() -> None:
    stages = Stage(0, (1, 0)), Stage(4096, (0, 1))
    order = BlendOrder([rebase.leaf_order(2), rebase.leaf_order(4)], Stages(stages), key=1)
    order = order.rebased(Rebase(4000, (4000, 0)))
    assert order.lookup(np.arange(4000, 5000)).leaf.tolist() == [0] * 96 + [1] * 904
    slope = [Stage(0, (2.0, 0.0), last=(0.0, 4.0)), Stage(8, (0.0, 1.0))]
    assert stages_from(slope, 2) == [Stage(0, (0.75, 0.25), last=(0.0, 4.0)), Stage(6, (0.0, 1.0))]
    assert Stages(tuple(slope)).samples(2) == [1.75, 0.25]
    assert stages_from(slope, 8) == stages_from(slope, 99) == [Stage(0, (0.0, 1.0))]


def test_golden_identities() -> None:
    """What states say of stages: of a slope, of cut blocks, of leaves that come and go, of more than twelve stages."""
    weights = [(1.0 + n, 2.0, 3.0 * (n > 14), float(n < 3)) for n in range(18)]
    stages = [Stage(5000 * n, weights[n], weights[n + 1] if n % 5 == 2 else None) for n in range(17)]
    leaves = [LeafIdentity(f"leaf {n}", 10, f"{n % 3:064x}") for n in range(4)]
    identity = Stages(tuple(stages)).identity({"kind": "train"}, leaves)
    found = [identity.at(position) for position in (0, 1, 4096, 4097, 10_001, 15_000, 24_577, 24_999, 80_001)]
    text = json.dumps([(one.settings, [leaf.name for leaf in one.leaves]) for one in (*found, identity.whole())])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "2999d6403cc5f858"


def test_a_blend_index_of_stages(tmp_path: Any) -> None:
    stages = Stages((Stage(0, (1, 0)), Stage(4096, (1, 3))))
    data_set, sample = build_blend_index(stages, 6000, key=3)
    expected = stages.blend(2, 3, 6000).lookup(np.arange(6000))
    assert np.array_equal((data_set, sample), expected)
    assert np.array_equal(build_blend_index(stages, 6000, tmp_path / "index", key=3, workers=2), expected)
    with pytest.raises(UsageError, match="never ends"):
        build_blend_index(Stages((Stage(0, (1, 0), last=(0, 1)),)), 10)
