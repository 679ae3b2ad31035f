"""Strategies as documents: what is read, and what is refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from energon_lite.batching.capacity import AttentionCost, Capacity, Ints
from energon_lite.batching.packing import BestFit, ConcatSplit, Greedy
from energon_lite.batching.padded import Fixed, MaxLength, SortedWindow
from energon_lite.batching.strategy import Strategy, strategy_from_dict, to_dict
from energon_lite.errors import ConfigError


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
    assert strategy_from_dict(to_dict(strategy)) == strategy
    assert to_dict(strategy).items() >= document.items()


@pytest.mark.parametrize(
    ("document", "at", "message"),
    [
        ({}, "", "'strategy' is missing"),
        ({"strategy": "bestfit", "capacity": 1}, "strategy", "did you mean 'best_fit'"),
        ({"strategy": "best_fit", "capacity": 10, "open_bin": 4}, "open_bin", "did you mean 'open_bins'"),
        ({"strategy": "best_fit"}, "", "missing key 'capacity'"),
        ({"strategy": "best_fit", "capacity": "10"}, "capacity", "expected a whole number; found text '10'"),
        ({"strategy": "best_fit", "capacity": True}, "capacity", "expected a whole number; found the truth value true"),
        ({"strategy": "best_fit", "capacity": 10, "open_bins": None}, "open_bins", "expected a whole number"),
        ({"strategy": "best_fit", "capacity": 10, "unit": "tokens"}, "unit", "padded_tokens"),
        ({"strategy": "best_fit", "capacity": 10, "alpha": 4}, "alpha", "no meaning with the unit packed_tokens"),
        ({"strategy": "best_fit", "capacity": 10, "oversize": "cut"}, "oversize", "truncate"),
        ({"strategy": "fixed", "batch_size": 2, "order": "bs"}, "order", "bs_asc"),
        ({"strategy": "fixed", "batch_size": 2, "unit": "cost"}, "unit", "unknown key 'unit'"),
        ({"strategy": "fixed", "batch_size": 2, "sort": 1}, "sort", "true or false"),
        (
            {"strategy": "max_length", "batch_size": 2, "max_length": 2, "key": 3},
            "key",
            "expected text; found the number 3",
        ),
        ([], "", "expected a mapping; found an empty list"),
    ],
)
def test_wrong_documents_are_refused_by_key(document: Any, at: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        strategy_from_dict(document, at="splits.train.batching")
    assert str(caught.value.where) == f"splits.train.batching.{at}".rstrip(".")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"strategy": "fixed", "batch_size": 0}, "batch_size is 0"),
        ({"strategy": "capacity", "capacity": 0}, "one token does not fit"),
        ({"strategy": "best_fit", "capacity": 10, "unit": "padded_tokens"}, "best_fit packs"),
        ({"strategy": "bfd", "capacity": 10, "unit": "padded_tokens"}, "bfd packs"),
        ({"strategy": "best_fit", "capacity": 10, "open_bins": 0}, "open_bins is 0"),
        ({"strategy": "best_fit", "capacity": 10, "max_age": 0}, "max_age is 0"),
        ({"strategy": "bfd", "capacity": 10, "chunk": 0}, "chunk is 0"),
        ({"strategy": "sorted_window", "capacity": 10, "batches": 0}, "batches is 0"),
        ({"strategy": "capacity", "capacity": 10, "max_samples": 0}, "max_samples is 0"),
        ({"strategy": "capacity", "capacity": 10, "multiple": 0}, "multiple is 0"),
        ({"strategy": "best_fit", "capacity": 10, "unit": "cost", "alpha": 0}, "alpha is 0"),
        ({"strategy": "length_difference", "batch_size": 1, "max_difference": -1}, "max_difference is -1"),
        ({"strategy": "max_length", "batch_size": 1, "max_length": 5, "oversize": "own_batch"}, "batch of its own"),
        ({"strategy": "concat_split", "tokens": 0}, "does not fit"),
    ],
)
def test_values_that_cannot_work(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        strategy_from_dict(document)


def test_a_cost_function_of_ones_own_is_named() -> None:
    document = to_dict(BestFit(Capacity(10, "cost", cost=_double)))
    assert document["cost"] == f"{_double.__module__}:_double"
    with pytest.raises(ConfigError, match="unknown key 'cost'"):
        strategy_from_dict(document)


def _double(lengths: Ints) -> Ints:
    return 2 * lengths
