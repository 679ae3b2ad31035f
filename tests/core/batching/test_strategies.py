"""What holds for every strategy, whatever the lengths: nothing is lost, too full, or too late, and nothing varies; and
strategies as documents."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.batching.capacity import UNITS, AttentionCost, Capacity, Ints
from energon_lite.batching.micro_batches import PLAN_ORDERS, MicroBatches
from energon_lite.batching.packing import BestFit, ConcatSplit, Greedy
from energon_lite.batching.padded import Fixed, MaxLength, SortedWindow
from energon_lite.batching.strategy import Strategy, plan_in_chunks, strategy_from_dict, to_dict
from energon_lite.errors import ConfigError, UsageError
from tests.testing import examples

LIMITS = st.integers(4, 60)
OVERSIZE = st.sampled_from(["drop", "truncate", "split", "own_batch"])
ORDERS = st.sampled_from(PLAN_ORDERS)


def _documents(strategy: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"strategy": st.just(strategy), **fields})


def _capacity(unit: st.SearchStrategy[str]) -> dict[str, st.SearchStrategy[Any]]:
    return {"capacity": LIMITS, "unit": unit, "multiple": st.sampled_from([1, 1, 3]), "oversize": OVERSIZE}


_SIZES, _FEW, _WINDOWS, _AGES, _PARTS = (
    st.integers(1, 5),
    *map(st.sampled_from, ([None, 1, 3], [None, 1, 2, 5], [None, 1, 4, 20], [None, 1, 10])),
)


_ANY, _SUMS = st.sampled_from(UNITS), st.sampled_from(["packed_tokens", "cost"])

#: Documents of all strategies.
DOCUMENTS = st.one_of(
    _documents("fixed", batch_size=_SIZES, sort=st.booleans(), order=ORDERS),
    _documents("capacity", **_capacity(_ANY), max_samples=_FEW, order=ORDERS),
    _documents("sorted_window", **_capacity(_ANY), batches=_WINDOWS, max_samples=_FEW, order=ORDERS),
    _documents("length_difference", batch_size=_SIZES, max_difference=st.integers(0, 9), order=ORDERS),
    _documents(
        "max_length",
        **{"batch_size": _SIZES, "max_length": LIMITS, "sort": st.booleans(), "order": ORDERS},
        oversize=st.sampled_from(["drop", "truncate", "split"]),
    ),
    _documents("best_fit", **_capacity(_SUMS), open_bins=_SIZES, max_age=_AGES),
    _documents("bfd", **_capacity(_SUMS), chunk=_PARTS, order=ORDERS),
    _documents("concat_split", tokens=LIMITS),
)
LENGTHS = st.lists(st.integers(0, 90), max_size=60).map(lambda values: np.array(values, dtype=np.int64))


def check_exactly_once(batches: MicroBatches, lengths: Ints) -> None:
    """Every token of every sample is in one micro-batch, or counted as left out."""
    counts = batches.counts
    shown = np.zeros(len(lengths), dtype=np.int64)
    np.add.at(shown, batches.sample, batches.length)
    pieces = np.bincount(batches.sample, minlength=len(lengths))
    dropped = pieces == 0
    assert dropped.sum() == counts.dropped_samples
    assert lengths[dropped].sum() == counts.dropped_tokens
    assert (pieces > 1).sum() == counts.split_samples
    cut = ~dropped & (shown < lengths)
    assert cut.sum() == counts.truncated_samples
    assert (lengths - shown)[cut].sum() == counts.truncated_tokens
    assert (shown <= lengths).all()
    # The pieces of a sample follow each other without a gap or an overlap.
    order = np.lexsort((batches.start, batches.sample))
    sample, start, length = (column[order] for column in (batches.sample, batches.start, batches.length))
    same = np.concatenate([[False], sample[1:] == sample[:-1]])[: len(sample)]
    assert (start[~same] == 0).all()
    assert (start[same] == (start + length)[np.flatnonzero(same) - 1]).all()
    assert (np.diff(batches.offsets) > 0).all() and batches.offsets[0] == 0 and batches.offsets[-1] == len(sample)


def check_capacity(strategy: Strategy, batches: MicroBatches) -> None:
    """No micro-batch is above the capacity, but those of one sample that are counted."""
    most = getattr(strategy, "max_samples", None) or getattr(strategy, "batch_size", None)
    if most is not None:
        assert (batches.rows() <= most).all()
    capacity = getattr(strategy, "capacity", None)
    if capacity is None:
        return
    sizes = capacity.sizes(batches.length)
    used = np.array(
        [
            sizes[first:last].sum() if capacity.adds_up else (last - first) * sizes[first:last].max()
            for first, last in zip(batches.offsets[:-1], batches.offsets[1:], strict=True)
        ]
    )
    over = used > capacity.limit
    assert over.sum() == batches.counts.own_batches
    assert (batches.rows()[over] == 1).all()


def lateness(batches: MicroBatches) -> Ints:
    """How many places after its place in the stream each entry comes."""
    rank = np.empty(len(batches.sample), dtype=np.int64)
    rank[np.lexsort((batches.start, batches.sample))] = np.arange(len(rank))
    return np.arange(len(rank)) - rank


@settings(max_examples=examples(300), deadline=None)
@given(DOCUMENTS, LENGTHS, st.integers(0, 2**64 - 1))
def test_laws(document: dict[str, Any], lengths: Ints, seed: int) -> None:
    strategy = strategy_from_dict(document)
    batches = strategy.plan(lengths, seed=seed)
    check_exactly_once(batches, lengths)
    check_capacity(strategy, batches)
    assert lateness(batches).max(initial=0) <= batches.lateness_bound
    assert strategy.plan(lengths.tolist(), seed=seed).digest() == batches.digest()  # type: ignore[arg-type]
    assert strategy_from_dict(to_dict(strategy)) == strategy


@settings(max_examples=examples(100), deadline=None)
@given(DOCUMENTS, LENGTHS, st.integers(1, 30))
def test_chunks_are_planned_alone(document: dict[str, Any], lengths: Ints, chunk: int) -> None:
    strategy = strategy_from_dict(document)
    whole = plan_in_chunks(strategy, lengths, seed=3, chunk=chunk)
    check_exactly_once(whole, lengths)
    assert lateness(whole).max(initial=0) <= whole.lateness_bound
    # What comes later changes nothing about a chunk that is complete.
    before = plan_in_chunks(strategy, lengths[: chunk * (len(lengths) // chunk)], seed=3, chunk=chunk)
    count = len(before) if len(before.sample) else 0
    assert [part.tolist() for part in before] == [part.tolist() for part in whole][:count]


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.sampled_from([1, 2, 9, 10, 11, 19, 20, 50]), max_size=200), st.integers(1, 6), st.integers(1, 40))
def test_best_fit_lets_nothing_starve(lengths: list[int], open_bins: int, max_age: int) -> None:
    """Sizes chosen to leave gaps that nothing fills."""
    document = {"strategy": "best_fit", "capacity": 20, "open_bins": open_bins, "max_age": max_age}
    batches = strategy_from_dict({**document, "oversize": "own_batch"}).plan(np.array(lengths, dtype=np.int64))
    assert batches.lateness_bound == max_age
    assert lateness(batches).max(initial=0) < max_age
    assert (batches.tokens()[batches.rows() > 1] <= 20).all()


def test_a_short_sample_that_never_fits_well_is_not_kept_to_the_end() -> None:
    # After 0, only samples that fill a micro-batch alone, or do not fit beside the first one.
    lengths = np.array([15] + [20, 19] * 500)
    windows = strategy_from_dict({"strategy": "sorted_window", "capacity": 40, "batches": 5}).plan(lengths)
    assert lateness(windows).max() < windows.lateness_bound < 50
    document = {"strategy": "capacity", "capacity": 10, "unit": "packed_tokens", "oversize": "own_batch"}
    own = strategy_from_dict(document).plan(np.array([3, 20, 3, 9]))  # the long one waits for what is open
    assert 0 < lateness(own).max() <= own.lateness_bound


def test_the_seed_decides_where_something_is_shuffled_and_only_there() -> None:
    lengths = np.arange(1, 200)
    for name, shuffles in (("capacity", False), ("best_fit", False), ("bfd", True), ("sorted_window", True)):
        strategy = strategy_from_dict({"strategy": name, "capacity": 400})
        digests = {strategy.plan(lengths, seed=seed).digest() for seed in range(5)}
        assert len(digests) == (5 if shuffles else 1), name


@pytest.mark.parametrize(
    ("document", "digest"),
    [
        ({"strategy": "fixed", "batch_size": 3, "sort": True, "order": "random"}, "634050a35a13cc7d"),
        ({"strategy": "capacity", "capacity": 500, "order": "pc_desc"}, "40312e3e4d00f1ee"),
        ({"strategy": "sorted_window", "capacity": 500, "batches": 20}, "da8b43117993a09e"),
        ({"strategy": "length_difference", "batch_size": 4, "max_difference": 1}, "63330292c820ee0d"),
        ({"strategy": "max_length", "batch_size": 4, "max_length": 64, "order": "bs_asc"}, "9a63d2a4a9ceca73"),
        ({"strategy": "best_fit", "capacity": 500, "open_bins": 8}, "ce85d3a462560463"),
        ({"strategy": "best_fit", "capacity": 800, "unit": "cost", "alpha": 100, "open_bins": 8}, "7fadd744e2a372b1"),
        ({"strategy": "bfd", "capacity": 500, "chunk": 1000}, "8b5084c9752813b3"),
        ({"strategy": "concat_split", "tokens": 500}, "351df55902e4bfc7"),
    ],
)
def test_plans_never_change(document: dict[str, Any], digest: str) -> None:
    """The digest of a plan is part of the format: a run that is resumed must find the same micro-batches."""
    lengths = np.arange(5000) * 2654435761 % 2**32 % 211
    assert plan_in_chunks(strategy_from_dict(document), lengths, seed=7, chunk=2048).digest()[:16] == digest


def test_a_cost_function_of_ones_own() -> None:
    strategy = strategy_from_dict({"strategy": "best_fit", "capacity": 100, "unit": "cost", "alpha": 10})
    assert strategy.capacity == Capacity(100, "cost", cost=AttentionCost(10))  # type: ignore[attr-defined]
    batches = strategy.plan(np.array([20, 20, 10, 10]))  # costs 60, 60, 20, 20
    assert [part.tolist() for part in batches] == [[0, 2, 3], [1]]
    with pytest.raises(UsageError, match="one integer for each length"):
        Capacity(100, "cost", cost=lambda lengths: lengths * 1.5)
    document = to_dict(BestFit(Capacity(10, "cost", cost=_double)))
    assert document["cost"] == f"{_double.__module__}:_double"
    with pytest.raises(ConfigError, match="unknown key 'cost'"):
        strategy_from_dict(document)


@pytest.mark.parametrize("junk", [[], ["best_fit"], {}, {"a": 1}, None, True, 5, 1.5, 2**80, "x", float("nan")])
def test_junk_is_refused_by_name(junk: Any) -> None:
    """Whatever stands at a key, the error is ours, and says at which."""
    whole = {"strategy": "best_fit", "capacity": 100, "open_bins": 8, "oversize": "error", "unit": "packed_tokens"}
    for key in whole:
        try:
            strategy_from_dict(whole | {key: junk})
        except ConfigError as error:
            assert error.fix and error.at and key in error.at
        else:
            assert isinstance(junk, int) and junk < 2**62 and key in ("capacity", "open_bins")


@pytest.mark.parametrize(
    ("document", "strategy"),
    [
        ({"strategy": "fixed", "batch_size": 4}, Fixed(4)),
        ({"strategy": "capacity", "capacity": 100}, Greedy(Capacity(100, "padded_tokens"))),
        (
            {"strategy": "sorted_window", "capacity": 100, "batches": None, "order": "bs_asc"},
            SortedWindow(Capacity(100, "padded_tokens"), batches=None, order="bs_asc"),
        ),
        ({"strategy": "best_fit", "capacity": 100, "multiple": 8}, BestFit(Capacity(100, multiple=8))),
        (
            {"strategy": "best_fit", "capacity": 100, "unit": "cost", "alpha": 5, "oversize": "drop"},
            BestFit(Capacity(100, "cost", cost=AttentionCost(5)), oversize="drop"),
        ),
        (
            {"strategy": "max_length", "batch_size": 2, "max_length": 9, "key": "prompt", "sort": True},
            MaxLength(2, 9, "prompt", sort=True),
        ),
        ({"strategy": "concat_split", "tokens": 7}, ConcatSplit(7)),
    ],
)
def test_documents_and_back(document: dict[str, Any], strategy: Strategy) -> None:
    assert strategy_from_dict(document) == strategy
    assert to_dict(strategy).items() >= document.items()


@pytest.mark.parametrize(
    ("document", "at", "message"),
    [
        ({}, "", "'strategy' is missing"),
        ({"strategy": "bestfit", "capacity": 1}, "strategy", "did you mean 'best_fit'"),
        ({"strategy": "best_fit", "capacity": 10, "open_bin": 4}, "open_bin", "did you mean 'open_bins'"),
        ({"strategy": "best_fit"}, "", "missing key 'capacity'"),
        ({"strategy": "mine"}, "strategy", "no imported module registers one"),
        ({"strategy": "best_fit", "capacity": "10"}, "capacity", "expected a whole number; found text '10'"),
        ({"strategy": "best_fit", "capacity": True}, "capacity", "expected a whole number; found the truth value true"),
        ({"strategy": "best_fit", "capacity": 10, "open_bins": None}, "open_bins", "expected a whole number"),
        ({"strategy": "best_fit", "capacity": 10, "unit": "tokens"}, "unit", "padded_tokens"),
        ({"strategy": "best_fit", "capacity": 10, "alpha": 4}, "alpha", "no meaning with the unit packed_tokens"),
        ({"strategy": "best_fit", "capacity": 10, "oversize": "cut"}, "oversize", "truncate"),
        ({"strategy": "fixed", "batch_size": 2, "order": "bs"}, "order", "bs_asc"),
        ({"strategy": "fixed", "batch_size": 2, "unit": "cost"}, "unit", "unknown key 'unit'"),
        ({"strategy": "fixed", "batch_size": 2, "sort": 1}, "sort", "true or false"),
        ({"strategy": "max_length", "batch_size": 2, "max_length": 2, "key": 3}, "key", "text; found the number 3"),
        ([], "", "expected a mapping; found an empty list"),
        ({"strategy": "fixed", "batch_size": 0}, "", "batch_size is 0"),
        ({"strategy": "capacity", "capacity": 0}, "", "capacity is 0"),
        ({"strategy": "best_fit", "capacity": 10, "unit": "padded_tokens"}, "", "best_fit packs"),
        ({"strategy": "bfd", "capacity": 10, "unit": "padded_tokens"}, "", "bfd packs"),
        ({"strategy": "best_fit", "capacity": 10, "open_bins": 0}, "", "open_bins is 0"),
        ({"strategy": "best_fit", "capacity": 10, "max_age": 0}, "", "max_age is 0"),
        ({"strategy": "bfd", "capacity": 10, "chunk": 0}, "", "chunk is 0"),
        ({"strategy": "sorted_window", "capacity": 10, "batches": 0}, "", "batches is 0"),
        ({"strategy": "capacity", "capacity": 10, "max_samples": 0}, "", "max_samples is 0"),
        ({"strategy": "capacity", "capacity": 10, "multiple": 0}, "", "multiple is 0"),
        ({"strategy": "best_fit", "capacity": 10, "unit": "cost", "alpha": 0}, "", "alpha is 0"),
        ({"strategy": "length_difference", "batch_size": 1, "max_difference": -1}, "", "max_difference is -1"),
        ({"strategy": "max_length", "batch_size": 1, "max_length": 5, "oversize": "own_batch"}, "", "batch of its own"),
        ({"strategy": "concat_split", "tokens": 0}, "", "capacity is 0"),
    ],
)
def test_wrong_documents_are_refused_by_key(document: Any, at: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        strategy_from_dict(document, at="splits.train.batching")
    assert str(caught.value.where) == f"splits.train.batching.{at}".rstrip(".")


def test_settings_are_integers_also_of_numpy() -> None:
    strategy = BestFit(Capacity(np.int64(10)), open_bins=np.int32(3))  # type: ignore[arg-type]
    assert json.loads(json.dumps(to_dict(strategy))) == to_dict(BestFit(Capacity(10), open_bins=3))
    for wrong in (9.5, np.float32(9), "9"):
        for make in (Capacity, ConcatSplit, Fixed, lambda value: BestFit(Capacity(9), max_age=value)):
            with pytest.raises(UsageError, match="give an integer, at least 1"):
                make(wrong)  # type: ignore[arg-type,operator]


def _double(lengths: Ints) -> Ints:
    return 2 * lengths
