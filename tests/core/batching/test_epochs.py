"""The epoch law of plans: small data sets come round several times in a chunk, and stay apart; so do copies."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.batching.epochs import keep_apart, plan_epochs
from energon_lite.batching.micro_batches import MicroBatches
from energon_lite.batching.padded import Fixed, LengthDifference
from energon_lite.batching.strategy import STRATEGIES, strategy_from_dict
from energon_lite.batching.token_plan import PlannedChunk, TokenPlan
from energon_lite.extras.blends.staged_run import Stages
from energon_lite.extras.blends.stages import WeightStage
from energon_lite.order.orders import BlendOrder, ConcatOrder, EpochBlendOrder, Order, Rebase
from energon_lite.order.shuffle import LeafOrder
from tests.testing import examples

CAPACITY = 100
DOCUMENTS: list[dict[str, Any]] = [
    {"strategy": "fixed", "batch_size": 4},
    {"strategy": "fixed", "batch_size": 4, "sort": True, "order": "random"},
    {"strategy": "capacity", "capacity": CAPACITY},
    {"strategy": "capacity", "capacity": CAPACITY, "unit": "packed_tokens", "max_samples": 6, "order": "bs_asc"},
    {"strategy": "sorted_window", "capacity": CAPACITY, "batches": 4},
    {"strategy": "sorted_window", "capacity": CAPACITY, "batches": None, "order": "none", "max_samples": 8},
    {"strategy": "sorted_window", "capacity": CAPACITY, "unit": "packed_tokens", "batches": None, "order": "pc_desc"},
    {"strategy": "length_difference", "batch_size": 5, "max_difference": 7},
    {"strategy": "max_length", "batch_size": 4, "max_length": 30, "sort": True, "order": "random"},
    {"strategy": "max_length", "batch_size": 4, "max_length": 30, "oversize": "drop"},
    {"strategy": "best_fit", "capacity": CAPACITY, "open_bins": 5},
    {"strategy": "best_fit", "capacity": 150, "unit": "cost", "alpha": 40, "oversize": "truncate"},
    {"strategy": "bfd", "capacity": CAPACITY},
    {"strategy": "bfd", "capacity": CAPACITY, "chunk": 50, "order": "none"},
    {"strategy": "concat_split", "tokens": CAPACITY},
    *({"strategy": "bfd", "capacity": 50, "oversize": how} for how in ("drop", "truncate", "split", "own_batch")),
    {"strategy": "capacity", "capacity": 45, "oversize": "split"},
]


def lengths_of(size: int, seed: int) -> np.ndarray:
    """1 to 60 tokens, many of them equal."""
    return np.random.default_rng(seed).integers(1, 61, size)


@st.composite
def orders(draw: st.DrawFn) -> tuple[Order, list[int]]:
    """One leaf, or a blend: by weight, by stages, by repetitions; perhaps of a pass that ends, or after a rebase."""
    sizes = draw(st.lists(st.sampled_from([1, 3, 10, 41, 150, 700]), min_size=1, max_size=4))
    leaves = [LeafOrder(size, key + 1, draw(st.sampled_from([1, 1, 1, None, 2]))) for key, size in enumerate(sizes)]
    amounts = [draw(st.sampled_from([0.1, 0.5, 1.0, 1.5, 3.0])) for _ in sizes]
    if sum(amount * size for amount, size in zip(amounts, sizes, strict=True)) < 1:
        amounts[0] = 1.0
    kind = draw(st.sampled_from(["weights", "weights", "stages", "repetitions", "concat"]))
    if kind == "concat":
        return ConcatOrder(sizes), sizes
    order: Order
    if kind == "repetitions":
        order = EpochBlendOrder(leaves, amounts, 5, repeat=draw(st.booleans()))
    elif kind == "stages" and len(sizes) > 1:
        stages = WeightStage(0, tuple(amounts)), WeightStage(300, tuple(reversed(amounts)))
        order = BlendOrder(leaves, Stages(stages), 5)
    else:
        order = BlendOrder(leaves, amounts, 5, length=draw(st.sampled_from([None, None, 400])))
    if order.bounds(0) is None and draw(st.booleans()):
        order = order.rebased(Rebase(0, tuple(size // 2 for size in sizes)))
    return order, sizes


def plan_of(order: Order, sizes: list[int], document: dict[str, Any], seed: int = 3, **more: Any) -> TokenPlan:
    lengths = [lengths_of(size, number) for number, size in enumerate(sizes)]
    return TokenPlan(order, strategy_from_dict(document), lengths, seed=seed, **more)


def chunks_of(plan: TokenPlan, positions: int) -> list[PlannedChunk]:
    """The chunks of pass 1 or, where there is only one pass, of its first positions."""
    number = 0 if plan.order.bounds(0) is None else 1
    count = plan.count(number)
    return [plan.make(number, chunk) for chunk in range(-(-positions // plan.chunk) if count is None else count)]


def cases(function: Any) -> Any:
    tried = given(
        made=orders(),
        document=st.sampled_from(DOCUMENTS),
        chunk=st.sampled_from([20, 40, 300, 900]),
        step=st.sampled_from([None, None, 4]),
    )(function)
    return settings(max_examples=examples(70))(tried)


@cases
def test_every_sample_comes_once_in_each_epoch(made: Any, document: dict[str, Any], chunk: int, step: Any) -> None:
    plan = plan_of(*made, document, chunk=chunk, step=step)
    for planned in chunks_of(plan, 1000):
        tokens: Counter[tuple[int, ...]] = Counter()
        for number in range(len(planned)):
            for leaf, index, epoch, _, length, _ in planned.spans(number):
                tokens[leaf, index, epoch] += length
        rows = planned.addresses.rows()
        assert len(set(rows)) == len(rows) and set(tokens) <= set(rows)
        missing = set(rows) - set(tokens)
        assert len(missing) == planned.batches.counts.dropped_samples
        for row, count in tokens.items():
            whole = int(plan.lengths[row[0]][row[1]])
            assert count == whole or (document.get("oversize") == "truncate" and 0 < count < whole)


@cases
def test_epochs_are_kept_apart(made: Any, document: dict[str, Any], chunk: int, step: Any) -> None:
    """No micro-batch has what comes before the end of an epoch of everything, and what comes behind; a step has it
    only if the end is inside of it. Copies of a sample are in the order of their epochs, and in different
    micro-batches, if there are enough of them."""
    order, plan = made[0], plan_of(*made, document, chunk=chunk, step=step)
    first = 0 if order.bounds(0) is None else order.bounds(1)[0]
    streams = [] if isinstance(order, ConcatOrder) else order.leaves.leaves
    mixed = {number for number, leaf in enumerate(streams) if leaf.copies == 2}  # on purpose
    for planned in chunks_of(plan, 1000):
        batches, count = planned.batches, len(planned.lengths)
        ends = np.array([end - first for end in order.epoch_ends(first, first + count)], dtype=np.int64)
        first += count
        assert set(ends) <= set(planned.stretches.edges)
        cycle = order.cycles(planned.addresses)
        stretch = np.searchsorted(planned.stretches.edges, np.arange(count), side="right")
        edges = planned.stretches.edges
        fewest = [len(plan.strategy.plan(planned.lengths[slice(*pair)])) for pair in pairwise(edges)]
        copies: Counter[Any] = Counter()
        for place, (leaf, index, _) in enumerate(planned.addresses.rows()):
            copies[stretch[place], leaf, index] += 1
        parts = [batches[number] for number in range(len(batches))]
        seen: set[Any] = set()
        latest: Counter[Any] = Counter()
        last = 0
        if step is not None:
            parts = [
                np.array([place_of[piece[:3]] for piece in pieces], dtype=np.int64)
                for place_of in [{row: place for place, row in enumerate(planned.addresses.rows())}]
                for turn in range(0, len(batches), step)
                for pieces in planned.step_spans(turn, step)
            ]
        apart = step is None or planned.capacity is None  # packed micro-batches of a step exchange their samples
        for turn in range(0, len(parts), step or 1):
            together = stretch[np.concatenate(parts[turn : turn + (step or 1)])]
            assert len(together) == 0 or last <= together.min()
            last = together.max(initial=last)
        for number, part in enumerate(parts):
            here: dict[Any, set[int]] = defaultdict(set)
            for place in part.tolist():
                leaf, index = int(planned.addresses.leaf[place]), int(planned.addresses.index[place])
                if leaf not in mixed:
                    here[leaf, index].add(int(cycle[place]))
            for owner, cycles in here.items():  # of a sample that was cut, the first piece counts
                new = [one for one in cycles if (owner, one) not in seen]
                assert step is not None or all(latest[owner] <= one for one in new), "a later epoch came before"
                seen |= {(owner, one) for one in new}
                latest[owner] = max(new, default=latest[owner])
            assert len(set(stretch[part])) <= 1 or not apart
            turn = number - number % (step or 1)
            together = stretch[part if apart else np.concatenate(parts[turn : turn + (step or 1)])]
            for (leaf, index), cycles in here.items():
                most = max(-(-copies[one, leaf, index] // fewest[one - 1]) for one in set(together.tolist()))
                assert len(cycles) <= most, (number, leaf, index)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_no_sample_twice_in_a_micro_batch_where_leaves_are_larger_than_it(strategy: str) -> None:
    """Whatever the sizes of the leaves, if the micro-batches of a stretch outnumber the copies of each sample."""
    document: dict[str, Any] = next(one for one in DOCUMENTS if one["strategy"] == strategy)
    sizes = [20, 33, 400, 5000]
    order = BlendOrder([LeafOrder(size, key) for key, size in enumerate(sizes)], [0.05, 0.1, 0.4, 0.45], 0)
    planned = plan_of(order, sizes, document, seed=1, chunk=8192).make(0, 0)
    assert len(planned.stretches.edges) > 5
    for number in range(len(planned)):
        owners = {piece[:3] for piece in planned.spans(number)}
        assert len({owner[:2] for owner in owners}) == len(owners)


def test_a_copy_that_moves_keeps_to_the_number_of_samples_and_to_the_difference() -> None:
    """It neither joins three samples that are like it, nor changes places with one of them."""
    samples = np.zeros(6, dtype=np.int64), np.array([0, 1, 1, 2, 3, 4]), np.array([0, 0, 1, 0, 0, 0])
    lengths = np.array([8, 10, 10, 12, 12, 12])
    batches, _ = plan_epochs(LengthDifference(3, 2, order="none"), lengths, samples, seed=0)
    assert [lengths[part].tolist() for part in batches] == [[8, 10], [12, 12, 12], [10]]


@pytest.mark.parametrize("copies", [2, -1])
def test_epochs_that_are_mixed_on_purpose_stay_mixed(copies: int) -> None:
    order = BlendOrder([LeafOrder(50, 1, copies)], [1.0], 0)
    planned = plan_of(order, [50], {"strategy": "fixed", "batch_size": 8}, chunk=1000).make(0, 0)
    assert len(planned.stretches.edges) - 1 == (10 if copies == 2 else 1)
    assert copies == 2 or planned.stretches.sample is None  # samples that are drawn have no copies
    parts = [planned.spans(number) for number in range(len(planned))]
    assert max(len({epoch for _, _, epoch, *_ in part}) for part in parts) == 2
    assert any(len({index for _, index, *_ in part}) < len(part) for part in parts)


def test_a_stretch_ends_with_an_epoch_rather_than_before_a_repeat() -> None:
    index, cycle = np.r_[150:300, 0:300], np.repeat([0, 1], [150, 300])
    _, stretches = plan_epochs(Fixed(1), np.ones_like(index), (np.zeros_like(index), index, cycle), seed=0)
    assert stretches.edges == [0, 150, 450]


@pytest.mark.parametrize(("strategy", "least"), [("best_fit", 0.95), ("bfd", 0.7), ("sorted_window", 0.65)])
def test_a_leaf_that_is_over_at_once_is_spread_evenly(strategy: str, least: float) -> None:
    """Half of all samples are one sample: each micro-batch must have it several times, but none has all."""
    order = BlendOrder([LeafOrder(1, 0), LeafOrder(10_000, 1)], [1.0, 1.0], 0)
    lengths = [np.array([40]), lengths_of(10_000, 0)]
    document = {"strategy": strategy, "capacity": 1000}
    planned = TokenPlan(order, strategy_from_dict(document), lengths, seed=1, chunk=2000).make(0, 0)
    many = [sum(piece[0] == 0 for piece in planned.spans(number)) for number in range(len(planned))]
    assert sum(many) == 1000 and max(many) <= 2 * 1000 / len(planned)
    assert planned.batches.tokens().sum() > least * 1000 * len(planned)


def test_fill_hardly_suffers() -> None:
    """Micro-batches of a data set of 3,001 samples, of which a chunk has 43 epochs, beside those of a large one."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(6, 0.6, 131_072)), 1, 8000).astype(np.int64)
    for document, lost in (({"strategy": "best_fit"}, 0.01), ({"strategy": "sorted_window"}, 0.015)):
        strategy = strategy_from_dict(document | {"capacity": 12_000})

        def fill(size: int, strategy: Any = strategy) -> float:
            order = BlendOrder([LeafOrder(size, 1)], [1.0], 0)
            batches = TokenPlan(order, strategy, [lengths[:size]], seed=1).make(0, 0).batches
            return float(batches.tokens().sum() / len(batches) / 12_000)

        assert fill(3001) > fill(131_072) - lost


@pytest.mark.parametrize("document", [one for one in DOCUMENTS if not one.get("oversize")], ids=str)
def test_a_chunk_without_repetition_is_planned_as_a_whole(document: dict[str, Any]) -> None:
    lengths, strategy = lengths_of(300, 0), strategy_from_dict(document)
    columns = np.zeros(300, dtype=np.int64), np.arange(300), np.zeros(300, dtype=np.int64)
    batches, stretches = plan_epochs(strategy, lengths, columns, seed=7)
    assert batches.digest() == strategy.plan(lengths, seed=7).digest() and stretches.edges == [0, 300]


@given(data=st.data(), batches=st.integers(2, 6), rows=st.integers(1, 8))
def test_a_copy_changes_places_with_a_sample_as_long(data: st.DataObject, batches: int, rows: int) -> None:
    """Where all are as long, micro-batches keep their number and their size, even full ones."""
    owner = np.arange(1, batches * rows + 1)
    copies = data.draw(st.integers(2, batches))
    owner[data.draw(st.permutations(range(len(owner))))[:copies]] = 0
    sizes = np.full(len(owner), 7)
    whole = MicroBatches.of([np.arange(len(owner))], sizes, packed=False)
    planned = whole.regrouped(np.arange(len(owner)), [rows] * batches)
    apart = keep_apart(planned, owner, sizes, np.zeros_like(sizes), lambda sizes, keys: False)
    assert apart.rows().tolist() == [rows] * batches
    assert sorted(apart.sample.tolist()) == list(range(len(owner)))
    assert all(np.count_nonzero(owner[part] == 0) <= 1 for part in apart)


@given(
    groups=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=2, max_size=6),
    copies=st.integers(2, 6),
    data=st.data(),
)
def test_what_is_full_stays_within_its_limit(groups: list[list[int]], copies: int, data: st.DataObject) -> None:
    """However long the samples are that change places, and nobody is lost."""
    lengths = np.array([length for group in groups for length in group], dtype=np.int64)
    owner = np.arange(1, len(lengths) + 1)
    same = data.draw(st.permutations(range(len(owner))))[:copies]
    owner[same], lengths[same] = 0, lengths[same[0]]
    planned = MicroBatches.of([np.arange(len(owner))], lengths, packed=True).regrouped(
        np.arange(len(owner)), [len(group) for group in groups]
    )
    limit = int(planned.tokens().max())
    keys = np.zeros_like(lengths)
    apart = keep_apart(planned, owner, lengths, keys, lambda sizes, keys: sum(sizes) <= limit)
    assert apart.tokens().max() <= limit
    assert sorted(apart.sample.tolist()) == list(range(len(owner)))
    most = -(-len(same) // len(groups))
    assert all(np.count_nonzero(owner[part] == 0) <= most for part in apart)
