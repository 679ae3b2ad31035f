"""Batches of workers' shares: each sample once, shares alike, the same however they are asked for."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.extras.energon.compat.dealt_plan import DealtPlan, Shares
from energon_lite.order import ConcatOrder
from tests.testing import examples

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=4)


@settings(max_examples=examples(100), deadline=None)
@given(
    lengths=LENGTHS,
    batch_size=st.integers(1, 7),
    world_size=st.integers(1, 4),
    workers=st.integers(1, 5),
    drop_last=st.booleans(),
)
def test_each_sample_is_in_one_batch_of_neighbours(
    lengths: list[int], batch_size: int, world_size: int, workers: int, drop_last: bool
) -> None:
    plan = DealtPlan(ConcatOrder(lengths), batch_size, drop_last, shares=Shares(tuple(lengths), world_size, workers))
    count, shares = plan.count(0), world_size * workers
    assert count is not None
    batches = [list(batch) for batch in plan.batches([(number,) for number in range(count)])]
    rows = [row for batch in batches for row in batch]
    every = {(leaf, index, 0) for leaf, length in enumerate(lengths) for index in range(length)}
    assert len(rows) == len(set(rows)) and set(rows) <= every and all(batches)
    assert all(batch == sorted(batch) for batch in batches)
    for batch in batches:  # inside of a data set, its samples are neighbours
        for leaf in {leaf for leaf, _, _ in batch}:
            own = [index for at, index, _ in batch if at == leaf]
            assert own == list(range(own[0], own[0] + len(own)))
    if drop_last:
        assert {len(batch) for batch in batches} <= {batch_size} and len(every) - len(rows) <= shares * (batch_size - 1)
    else:
        assert set(rows) == every
        # Shares are alike: the samples of all data sets together are dealt evenly.
        assert len([batch for batch in batches if len(batch) < batch_size]) <= shares
        sizes = np.diff(np.r_[0, np.cumsum(np.bincount(np.arange(sum(lengths)) % shares, minlength=shares))])
        assert count == sum(-(-int(size) // batch_size) for size in sizes)
    assert plan.batches([(count,), (count + 5,)]) == [[], []]
    assert [list(plan.batches([(number,)])[0]) for number in range(count)] == batches


def test_workers_take_turns_and_ranks_have_neighbours() -> None:
    plan = DealtPlan(ConcatOrder([13]), 2, shares=Shares((13,), 2, 2))
    batches = [
        [index for _, index, _ in batch] for batch in plan.batches([(number,) for number in range(plan.count(0) or 0)])
    ]
    assert batches == [[0, 1], [7, 8], [4, 5], [10, 11], [2, 3], [9], [6], [12]]
    assert sorted(batches[0::2]) == [[0, 1], [2, 3], [4, 5], [6]]
