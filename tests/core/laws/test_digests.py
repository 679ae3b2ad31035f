"""The digest of what was delivered: of these very samples, the same on any ranks and workers and after any restore; and
a sample that is lost, doubled, changed or moved to another step is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from energon_lite import (
    BestFit,
    Capacity,
    Chunks,
    Fixed,
    SkipSample,
    TaskEncoder,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.batching import chain_digest, set_digest
from energon_lite.batching.digests import AddressList
from energon_lite.extras.energon import BatchDataset
from energon_lite.extras.inspect.audit import PlannedSteps, check_steps
from energon_lite.extras.inspect.audited_run import RecordedStep, first_difference
from energon_lite.order.hashing import MASK64
from tests.core.laws.conftest import Cluster
from tests.core.laws.kinds import training
from tests.core.laws.token_data import Tokens
from tests.testing import ALONE, examples, train_loader

blends = st.lists(st.tuples(st.sampled_from([3, 7, 50]), st.sampled_from([0.3, 1.0])), min_size=1, max_size=3)


class Addressed(TaskEncoder):
    """Batches that say which samples they are made of; one sample of so many is skipped."""

    def __init__(self, skips: int = 0):
        self.skips = skips

    @stateless
    def encode_sample(self, sample: Any) -> dict[str, Any]:
        if self.skips and hash_of(sample.__key__) % self.skips == 0:
            raise SkipSample
        return {"name": sample.__key__, "epoch": sample.__restore_key__[3]}


def hash_of(key: str) -> int:
    return sum(map(ord, key)) * 7919 >> 2


def digests_of(ranks: Any, steps: int) -> list[int]:
    """Those of the micro-batches of so many steps, one after the other."""
    return [loader.digest for _ in range(steps) for _, loader in zip(ranks.step(), ranks.loaders, strict=True)]


@settings(max_examples=examples(15))
@given(blend=blends, batch_size=st.integers(1, 5), skips=st.sampled_from([0, 0, 3]), workers=st.sampled_from([0, 0, 2]))
def test_it_is_that_of_the_samples_in_the_batch(
    write_blend: Callable[..., Any], blend: Any, batch_size: int, skips: int, workers: int
) -> None:
    build = training(write_blend(blend), batch_size=batch_size, task_encoder=Addressed(skips))
    with Cluster(build, 2, workers) as ranks:
        leaves = ranks.loaders[0].dataset.leaves
        where = {
            leaf.source.key(index): (n, index) for n, leaf in enumerate(leaves) for index in range(len(leaf.source))
        }
        assume(
            not skips
            or all(any(hash_of(k) % skips for k, (n, _) in where.items() if n == m) for m in range(len(blend)))
        )
        for _ in range(4):
            for batch, loader in zip(ranks.step(), ranks.loaders, strict=True):
                epochs = batch["epoch"].tolist() if hasattr(batch["epoch"], "tolist") else batch["epoch"]
                delivered = [(*where[name], epoch) for name, epoch in zip(batch["name"], epochs, strict=True)]
                assert loader.digest == set_digest(delivered)


@pytest.mark.usefixtures("known_lengths")
@pytest.mark.parametrize("step", [None, 12])
def test_planned_tokens_have_equal_digests_on_any_ranks(write_blend: Callable[..., Any], step: int | None) -> None:
    arguments: Any = {"batching": BestFit(Capacity(50), oversize="split"), "chunk_size": 60}
    arguments |= {"micro_batches_per_step": step, "task_encoder": Tokens()}
    build = training(write_blend([(50, 1.0), (120, 0.3)]), **arguments)
    sums = []
    for world in (1, 2, 3, 4):
        with Cluster(build, world, 0) as ranks:
            every = digests_of(ranks, 48 // world)
            sums.append([sum(every[first : first + 12]) & MASK64 for first in range(0, 48, 12)])
            planned = PlannedSteps(ranks.loaders[0].dataset)
    assert sums == sums[:1] * 4 and len(set(sums[0])) == 4
    assert [planned.digest(RecordedStep(n, 0, 12 * n, 12 * n + 12, 0)) for n in range(4)] == sums[0]
    addresses = [a for batch in planned.addresses(0, 0, 12) for a in batch]
    assert any(address[5] for address in addresses)  # some were cut
    assert set_digest(addresses) == sums[0][0]
    short = [address[:3] for address in addresses]
    assert set_digest(AddressList(short)) == set_digest(short)


# -- faults -----------------------------------------------------------------------------------------------------------

KINDS = ("lost", "doubled", "changed", "moved")


def with_fault(steps: list[list[list[Any]]], kind: str, draw: random.Random, world: int) -> tuple[int, ...]:
    """One fault in what some rank delivers in some step.

    Args:
        steps: the micro-batches of each, lists of addresses; they are changed.

    Returns:
        The steps that have other samples now.
    """
    at = draw.randrange(len(steps))
    batch = draw.choice([batch for rank in range(world) for batch in steps[at][rank::world] if batch])
    place = draw.randrange(len(batch))
    sample = batch[place]
    if kind == "lost":
        del batch[place]
    elif kind == "doubled":
        batch.append(sample)
    elif kind == "changed":
        leaf, index, epoch, *piece = sample
        field = draw.randrange(2)
        batch[place] = (leaf, index + (not field), epoch + field, *piece)
    else:
        other = draw.choice([n for n in range(len(steps)) if n != at])
        del batch[place]
        draw.choice(steps[other]).append(sample)
        return tuple(sorted((at, other)))
    return (at,)


@pytest.mark.usefixtures("known_lengths")
@pytest.mark.parametrize("way", ["fixed", "tokens", "even steps", "small epochs"])
def test_ten_thousand_faults_are_found(write_blend: Callable[..., Any], way: str) -> None:
    metadataset = write_blend([(120, 1.0), (50, 0.3)])
    arguments: dict[str, Any] = {"batch_size": 3}
    if way != "fixed":
        arguments = {"batching": BestFit(Capacity(100)), "chunk_size": 200, "task_encoder": Tokens()}
        arguments |= {"micro_batches_per_step": 12} if way == "even steps" else {}
    if way == "small epochs":
        metadataset, arguments["batching"] = write_blend([(7, 1.0)]), Fixed(3, sort=True)
    planned = PlannedSteps(get_train_dataset(metadataset, worker_config=ALONE, **arguments))
    draw, count, digest = random.Random(7), 12, lru_cache(None)(set_digest)  # most batches have no fault
    good = [[list(batch) for batch in planned.addresses(0, count * n, count * n + count)] for n in range(12)]

    def recorded(digests: list[int]) -> list[RecordedStep]:
        return [RecordedStep(n, 0, count * n, count * n + count, one) for n, one in enumerate(digests)]

    digests = [planned.digest(step) for step in recorded([0] * 12)]
    chain = 0
    for one in digests:
        chain = chain_digest(chain, one)
    for turn in range(2500):
        kind, world = KINDS[turn % 4], draw.choice([1, 2, 3, 4, 6, 12])
        steps = [[list(batch) for batch in step] for step in good]
        changed = with_fault(steps, kind, draw, world)
        # Each rank adds up its own; then the ranks add up theirs.
        of_ranks = [[sum(digest(tuple(b)) for b in step[rank::world]) for rank in range(world)] for step in steps]
        found = [sum(ranks) & MASK64 for ranks in of_ranks]
        assert tuple(n for n in range(12) if found[n] != digests[n]) == changed, (kind, world)
        again = 0
        for one in found:
            again = chain_digest(again, one)
        assert again != chain
        if turn < 40:  # and which sample it was
            faults = list(check_steps(planned, recorded(found)))
            assert tuple(fault.recorded.step for fault in faults) == changed
            difference = first_difference(recorded(found), recorded(digests))
            assert not isinstance(difference, int) and difference.ours[0].step == changed[0]
            if kind in ("lost", "doubled"):
                named = faults[0].lost if kind == "lost" else faults[0].added
                assert named in {tuple(a) for batch in good[changed[0]] for a in batch}


def test_steps_of_different_numbers_of_micro_batches_are_compared(leaf_of: Callable[[int, str], Path]) -> None:
    planned = PlannedSteps(train_loader(leaf_of(50, "a"), batch_size=2).dataset)

    def run(share: int, steps: int) -> list[RecordedStep]:
        edges = [RecordedStep(n, 0, n * share, n * share + share, 0) for n in range(steps)]
        return [RecordedStep(one.step, 0, one.first, one.stop, planned.digest(one)) for one in edges]

    assert first_difference(run(4, 6), run(6, 4)) == 2  # at 12 and 24
    other = run(6, 4)
    other[2] = RecordedStep(2, 0, 12, 18, other[2].digest ^ 1)
    difference = first_difference(run(4, 6), other)
    assert not isinstance(difference, int)
    assert [step.step for step in difference.ours] == [3, 4, 5] and [step.step for step in difference.theirs] == [2, 3]


def test_a_failed_sample_is_told_from_a_fault(leaf_of: Callable[[int, str], Path]) -> None:
    with train_loader(leaf_of(50, "a"), batch_size=2, task_encoder=Addressed(5)) as loader:
        recorded = [RecordedStep(n, 0, n, n + 1, loader.digest) for n, _ in zip(range(25), loader, strict=False)]
        lost = loader.stats()["skipped"]
    faults = list(check_steps(PlannedSteps(loader.dataset), recorded))
    assert lost and faults
    one_each = [fault for fault in faults if fault.lost is not None]
    assert one_each and all(fault.failed for fault in one_each)
    source = loader.dataset.leaves[0].source
    assert all(hash_of(source.key(fault.lost[1])) % 5 == 0 for fault in one_each if fault.lost)


def test_wrapped_data_sets_add_up_those_inside(leaf_of: Callable[[int, str], Path]) -> None:
    loader = train_loader(leaf_of(50, "a"), batch_size=2)
    single = [loader.digest for _ in zip(range(6), loader, strict=False)]
    wrapped = get_savable_loader(BatchDataset(loader.dataset, 3, batcher=lambda items: items, worker_config=ALONE))
    pairs = [wrapped.digest for _ in zip(range(2), wrapped, strict=False)]
    assert pairs == [sum(single[:3]) & MASK64, sum(single[3:]) & MASK64]


def test_each_batch_that_is_made_of_one_has_a_digest_of_its_own(leaf_of: Callable[[int, str], Path]) -> None:
    class Twice(TaskEncoder):
        def encode_batch(self, batch: Any) -> Any:
            yield batch
            yield batch

    one_lane = Chunks(lanes=1)
    dataset = get_train_dataset(
        leaf_of(20, "a"), batch_size=2, task_encoder=Twice(), worker_config=ALONE, chunks=one_lane
    )
    with get_savable_loader(dataset) as loader:
        assert len({loader.digest for _, _ in zip(range(8), loader, strict=False)}) == 8
