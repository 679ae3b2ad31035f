"""All laws at once: random hooks on random topologies, saved and restored at random, against a plain oracle.

The oracle (``oracle.py``, beside this file) is one rank without workers, that goes through the same addresses in plain
loops. The run begins on some ranks, is saved, goes on on others, and so on. Each step must have, rank by rank, what
the oracle says; a rank that has nothing gets an empty batch; and what all loaders counted adds up to what the oracle
counted.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset, get_val_dataset
from energon_lite.loading.iterators.planned_dataset import PlannedDataset

sys.path.insert(0, str(Path(__file__).parent))

from oracle import Batch, Hooks, LaneRun, NoBatches, PlannedRun, Walker, encoder_of

WORLDS = (1, 2, 3, 4)
KINDS = ("samples", "skipped", "failed", "dropped")


@dataclass(frozen=True)
class Case:
    """A data set, and what is made of it.

    Args:
        hooks: see the oracle.
        size: samples of the data set.
        ends: passes end; with ``limit``, after so many steps.
        chunk: positions of a chunk, in buffers of packing if there are any; None: the default.
    """

    hooks: Hooks
    size: int
    ends: bool
    drop_last: bool
    limit: int | None
    chunk: int | None
    remainder: str | None
    lanes: int | None

    def dataset(self, path: Any, rank: int, world: int, workers: int = 0) -> Any:
        config = WorkerConfig(rank=rank, world_size=world, num_workers=workers)
        arguments: dict[str, Any] = {
            "batch_size": self.hooks.batch_size,
            "batch_drop_last": self.drop_last,
            "task_encoder": encoder_of(self.hooks),
        }
        if self.hooks.decide:
            unit = self.hooks.packing or 1
            arguments |= {
                "packing_buffer_size": self.hooks.packing,
                "chunk_size": None if self.chunk is None else self.chunk * unit,
                "chunk_remainder": self.remainder,
                "lanes": self.lanes,
            }
        if self.ends:
            return get_val_dataset(path, worker_config=config, limit=self.limit, **arguments)
        return get_train_dataset(path, worker_config=config, **arguments)

    def walker(self, path: Any, world: int) -> Walker:
        """The oracle, for a run that begins on so many ranks."""
        dataset = self.dataset(path, 0, 1)
        lanes = self.lanes or 24
        run = (
            PlannedRun(dataset, self.hooks)
            if isinstance(dataset, PlannedDataset)
            else LaneRun(dataset, self.hooks, lanes)
        )
        limit = None if self.limit is None or not self.ends else self.limit * world
        return Walker(run, limit, self.drop_last and self.ends)


def hooks_that(decide: bool) -> st.SearchStrategy[Hooks]:
    hooks = st.builds(
        Hooks,
        salt=st.integers(0, 9),
        losses=st.sampled_from([0, 0, 3, 6]),
        yields=st.booleans() if decide else st.just(False),
        packing=st.sampled_from([None, None, 3, 5]) if decide else st.none(),
        groups=st.sampled_from([0, 0, 2, 3]) if decide else st.just(0),
        batch_yields=st.booleans() if decide else st.just(False),
        batch_size=st.sampled_from([None, 1, 2, 3, 5]),
    )
    possible = hooks.filter(lambda one: not one.groups or (one.batch_size is not None and not one.batch_yields))
    return possible.filter(lambda one: one.decide == decide)


def cases(decide: bool) -> st.SearchStrategy[Case]:
    case = st.builds(
        Case,
        hooks=hooks_that(decide),
        size=st.integers(4 if decide else 20, 60),  # with a plan, a step of full batches for all ranks is needed
        ends=st.booleans(),
        drop_last=st.booleans(),
        limit=st.sampled_from([None, None, 1, 3, 7]),
        chunk=st.sampled_from([None, 1, 2, 3, 7]),
        remainder=st.sampled_from([None, None, None, "keep", "drop"]),
        lanes=st.sampled_from([None, 12]),
    )
    # In training, a sample of a plan that fails is replaced by one that only the library draws.
    return case.filter(lambda one: decide or one.ends or not one.hooks.losses)


#: Ranks and steps until the run is saved, and goes on on the next ones.
chains = st.lists(st.tuples(st.sampled_from(WORLDS), st.integers(0, 6)), min_size=1, max_size=5)


def _names(batch: Any) -> list[str]:
    if batch is None:
        return []
    keys = batch["__key__"]
    return [keys] if isinstance(keys, str) else list(keys)


@dataclass
class Part:
    """A part of a run on the same ranks: the steps it has to make, and whether the pass is over then."""

    world: int
    steps: list[list[Batch | None]]
    ends: bool = False


def _expected(walker: Walker, chain: list[tuple[int, int]], ends: bool) -> list[Part]:
    """What the oracle says."""
    parts: list[Part] = []
    for number, (world, count) in enumerate(chain):
        most = None if ends and number + 1 == len(chain) else count
        parts.append(_part(walker, world, most))
        while parts[-1].ends and not parts[-1].steps and len(parts) > 1:
            # There is no step left for these ranks, so the ranks before them go to the end.
            parts.pop()
            before = parts.pop()
            rest = _part(walker, before.world, None)
            parts.append(Part(before.world, before.steps + rest.steps, ends=True))
        if parts[-1].ends:
            break
    return parts


def _part(walker: Walker, world: int, most: int | None) -> Part:
    """So many steps on these ranks; None: all there are."""
    part = Part(world, [])
    while most is None or len(part.steps) < most:
        step = walker.step(world)
        if step is None:
            return Part(world, part.steps, ends=True)
        part.steps.append(step)
    return part


def _check(on_ranks: Callable[..., list[Any]], path: Any, case: Case, chain: list[tuple[int, int]]) -> None:
    walker = case.walker(path, chain[0][0])
    try:
        parts = _expected(walker, chain, case.ends)
    except NoBatches:
        assume(False)
    assume(parts[0].steps)  # else the pass is one without batches, and the next one is asked for
    counted: Counter[str] = Counter()
    states: Any = None
    for part in parts:

        def work(rank: int, part: Part = part, states: Any = states) -> Any:
            with get_savable_loader(case.dataset(path, rank, part.world)) as loader:
                if states is not None:
                    loader.restore_state_global(states)
                batches = iter(loader) if part.ends else (batch for _, batch in zip(part.steps, loader, strict=False))
                return list(batches), loader.save_state_rank(), loader.stats()

        results = on_ranks(part.world, work)
        steps = zip(*[batches for batches, _, _ in results], strict=True)  # all ranks made as many steps
        found = [[_names(batch) for batch in step] for step in steps]
        assert found == [[[] if batch is None else batch.names for batch in step] for step in part.steps]
        states = json.loads(json.dumps([state for _, state, _ in results]))
        for _, _, stats in results:
            counted.update({kind: stats[kind] for kind in KINDS})
    least, most = walker.counts, walker.counts + (walker.run.left_over() if parts[-1].ends else Counter())
    if walker.drop_last or walker.limit is not None:  # a lane may be over or not
        assert all(least[kind] <= counted[kind] <= most[kind] for kind in KINDS)
    else:
        assert {kind: counted[kind] for kind in KINDS} == {kind: most[kind] for kind in KINDS}


@given(case=cases(decide=True), chain=chains)
def test_hooks_that_decide(on_ranks: Any, leaf_of: Any, case: Case, chain: list[tuple[int, int]]) -> None:
    _check(on_ranks, leaf_of(case.size, "a"), case, chain)


@given(case=cases(decide=False), chain=chains)
def test_planned_batches(on_ranks: Any, leaf_of: Any, case: Case, chain: list[tuple[int, int]]) -> None:
    _check(on_ranks, leaf_of(case.size, "a"), case, chain)
