"""Validation under Energon's names has the batches of Energon's workers, rank by rank, in their order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import StateMismatchError
from energon_lite.extras.energon.compat import loaders as compat
from energon_lite.extras.energon.compat.dealt_plan import DealtPlan, Shares
from energon_lite.order.orders import ConcatOrder
from tests.testing import examples


@settings(max_examples=examples(25), deadline=None)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=3),
    batch_size=st.integers(1, 6),
    world=st.integers(1, 4),
    workers=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_shares_are_those_of_energon(
    lengths: list[int], batch_size: int, world: int, workers: int, drop_last: bool
) -> None:
    energon = pytest.importorskip("megatron.energon")
    from megatron.energon.flavors.webdataset.sharder import Sharder

    expected: list[list[tuple[int, int, int]]] = []
    for rank in range(world):
        config = energon.WorkerConfig(rank=rank, world_size=world, num_workers=workers)
        shares: list[list[tuple[int, int, int]]] = [[] for _ in range(workers)]
        for leaf, length in enumerate(lengths):
            begun = sum(lengths[:leaf]) % (world * workers)
            edges = Sharder.split_samples_to_workers(0, length, config, rotation_offset=begun)
            for worker, share in enumerate(shares):
                share += [(leaf, index, 0) for index in range(edges[worker], edges[worker + 1])]
        own = [[share[at : at + batch_size] for at in range(0, len(share), batch_size)] for share in shares]
        own = [[one for one in some if not drop_last or len(one) == batch_size] for some in own]
        turns = range(max(map(len, own)))
        expected += [some[turn] for turn in turns for some in own if turn < len(some)]
    plan = DealtPlan(ConcatOrder(lengths), batch_size, drop_last, shares=Shares(tuple(lengths), world, workers))
    found = [list(batch) for batch in plan.batches([(number,) for number in range(plan.count(0) or 0)])]
    assert sorted(found) == sorted(expected)
    if world == 1:
        assert found == expected
    count = len(found)
    assert plan.batches([(count,), (count + 5,)]) == [[], []]
    assert [list(plan.batches([(number,)])[0]) for number in range(count)] == found


def test_who_is_dealt_to_is_part_of_the_run(leaf_of: Any) -> None:
    import energon_lite

    loaders = []
    for workers in (2, 2, 3):
        config = energon_lite.WorkerConfig(rank=0, world_size=1, num_workers=workers)
        dataset = compat.get_val_dataset(leaf_of(20), split_part="train", batch_size=3, worker_config=config)
        loaders.append(energon_lite.get_savable_loader(dataset))
    first, same, other = loaders
    whole = [batch.__key__ for batch in first]
    next(batches := iter(first))
    state = first.save_state_rank()
    same.restore_state_rank(state)
    assert [batch.__key__ for batch in same] == whole[1:] == [batch.__key__ for batch in batches]
    assert same.restore_sample(("batch", 0, 4)).__key__ == whole[4]
    with pytest.raises(StateMismatchError, match="dealt_to"):
        other.restore_state_rank(state)
    for loader in loaders:
        loader.close()
