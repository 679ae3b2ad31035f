"""Validation under Energon's names has the batches of Energon's workers, rank by rank, in their order."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import StateMismatchError
from energon_lite.extras.energon.compat import loaders as compat
from energon_lite.extras.energon.compat.dealt_plan import DealtPlan, Shares
from energon_lite.order import ConcatOrder
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


def keys_of(make: Any, get_loader: Any, path: Path, config: Any, **options: Any) -> tuple[int, list[list[str]]]:
    """The length of a loader, and the keys of its batches."""
    loader = get_loader(make(str(path), worker_config=config, split_part="train", batch_size=3, **options))
    return len(loader), [list(batch.__key__) for batch in loader]


@pytest.mark.nightly  # it takes five seconds to collect each of Energon's loaders
def test_batches_of_a_loader_are_those_of_energon(tmp_path: Path, tools: Any) -> None:
    energon = pytest.importorskip("megatron.energon")
    import energon_lite

    for name, samples in (("a", 25), ("b", 9)):
        (tmp_path / name).mkdir()
        for shard in range(3):
            with tarfile.open(tmp_path / name / f"s{shard}.tar", "w") as tar:
                for number in range(shard, samples, 3):
                    tools.add(tar, f"{name}{number:03d}.txt", b"text")
        options = ("--split-ratio", "1,0,0", "--sample-type", "TextSample", "--field-map", '{"text": "txt"}')
        tools.energon_prepare(tmp_path / name, *options)
    blend = tmp_path / "blend.yaml"
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
    blend.write_text(head + "      - path: a\n      - path: b\n")
    for path in (tmp_path / "a", blend):
        lengths: list[tuple[int, int]] = []
        for rank in range(2):
            place = {"rank": rank, "world_size": 2, "num_workers": 2}
            theirs = keys_of(energon.get_val_dataset, energon.get_loader, path, energon.WorkerConfig(**place))
            ours = keys_of(compat.get_val_dataset, energon_lite.get_loader, path, energon_lite.WorkerConfig(**place))
            assert [keys for keys in ours[1] if keys] == theirs[1], (path, rank)
            lengths.append((ours[0], theirs[0]))
        assert {one for one, _ in lengths} == {max(other for _, other in lengths)}  # here, ranks are in step
    config = energon_lite.WorkerConfig(rank=0, world_size=1, num_workers=3)
    limited = keys_of(compat.get_val_dataset, energon_lite.get_loader, blend, config, limit=2)
    assert limited[0] == 2 and [len(batch) for batch in limited[1]] == [3, 3]


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
