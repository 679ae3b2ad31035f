"""The oracle: random pipelines on random ranks and workers, saved and restored, against plain code on one rank.

``python -m tests.core.laws.oracle --pipelines 2000 --seed 0`` runs 2,000, and prints each difference with the seed that
makes its pipeline again (``--only SEED``), and what was refused.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from energon_lite import EnergonLiteError, WorkerConfig, get_savable_loader
from energon_lite.errors import FatalSampleError
from energon_lite.loading.iterators import lane_iterator
from energon_lite.loading.iterators.lane_dataset import LaneDataset
from tests.core.laws.naive_items import KINDS, Memory, names_in, plain
from tests.core.laws.naive_steps import END, Events, Part, Refused, Starved, expected_of, is_wanted, walker_of
from tests.core.laws.naive_wrappers import Node
from tests.core.laws.pipelines import Base, random_node
from tests.core.laws.sources import write_data


class Difference(AssertionError):
    """The run is not what the oracle says."""


@dataclass(frozen=True)
class Pipeline:
    """A data set, and the parts in which it is run."""

    seed: int
    node: Node
    parts: tuple[Part, ...]

    def config(self, part: Part, rank: int) -> WorkerConfig:
        return WorkerConfig(rank=rank, world_size=part.world, num_workers=part.workers)


def random_pipeline(seed: int, root: Path) -> Pipeline:
    """The pipeline of a seed."""
    random = Random(seed)
    node = random_node(random, root)
    worlds = [random.choice([1, 2, 3, 4]) for _ in range(random.randint(1, 4))]
    if any(one.by_rank for one in node.inner):
        worlds = worlds[:1] * len(worlds)
    parts = list[Part]()
    for world in worlds:
        method = random.choices(["main", "thread", "fork"], [9, 2 * isinstance(node, Base), 0 if world > 2 else 1])[0]
        workers = 0 if method == "main" else random.choice([1, 2])
        parts.append(Part(world, workers, method, random.randint(0, 8), again=random.random() < 0.15))
    return Pipeline(seed, node, tuple(parts))


def delivered(loader: Any, steps: int) -> Events:
    """The same of one rank of a run. Its last batch is made again from its key."""
    events, iterator, batch = Events(), iter(loader), None
    while is_wanted(events, steps):
        try:
            batch = next(iterator)
            events.append(plain(batch))
        except StopIteration:
            events.append(END)
            iterator = iter(loader)
    key = batch.get("__restore_key__") if isinstance(batch, dict) else getattr(batch, "__restore_key__", None)
    is_batch = key and key[0] != "empty"
    if is_batch and (made := plain(loader.restore_sample(json.loads(json.dumps(key))))) != plain(batch):
        raise Difference(f"{key} is\n  {made}\ninstead of\n  {plain(batch)}")
    return events


class Rendezvous:
    """In place of an all-reduce: the ranks are threads of this process. One of them works at a time, if asked to."""

    def __init__(self, world: int, turn: Any = None):
        self._barrier = threading.Barrier(world, timeout=120)
        self._numbers: list[int] = []
        self._lock, self._turn = threading.Lock(), turn
        self._found = (0, 0)

    def agree(self, step: int, *, group: Any) -> tuple[int, int]:
        with self._lock:
            self._numbers.append(step)
        with ExitStack() as stack:
            if self._turn is not None:
                self._turn.release()
                stack.callback(self._turn.acquire)
            if self._barrier.wait() == 0:
                self._found = min(self._numbers), max(self._numbers)
                self._numbers = []
            self._barrier.wait()
        return self._found


def on_ranks(world: int, work: Callable[[int], Any]) -> list[Any]:
    """``work(rank)`` of ranks that meet before each step; their hooks run one at a time."""
    turn = threading.Lock()
    meeting = Rendezvous(world, turn)

    def alone(rank: int) -> Any:
        with turn:
            return work(rank)

    with mock.patch.multiple(lane_iterator, agree_on_step=meeting.agree, check_group=lambda **_: None):
        with ThreadPoolExecutor(world) as pool:
            return list(pool.map(alone, range(world)))


def run(pipeline: Pipeline) -> None:
    """Compare a pipeline with the oracle.

    Raises:
        Difference, Wrong: they differ.
        Refused, Starved: there is nothing to be compared.
    """
    node, memory = pipeline.node, Memory()
    with refusals():
        datasets = [[node.build(pipeline.config(part, rank)) for rank in range(part.world)] for part in pipeline.parts]
        kinds = {type(dataset.resolved) for ranks in datasets for dataset in ranks}
        walker = walker_of(node, pipeline.parts[0].world)
        expected = [expected_of(walker, part) for part in pipeline.parts]
    states: Any = None
    counted, least = Counter[str](), Counter[str]()
    for part, ranks, events in zip(pipeline.parts, datasets, expected, strict=True):
        with starving(node):
            own, states, stats = run_part(part, ranks, states, meet=LaneDataset in kinds and part.world > 1)
        if len({len(found) for found in own}) > 1:
            raise Difference(f"{part}: the ranks make {[len(found) for found in own]} steps")
        in_steps = any(base.in_steps for base in node.bases)
        for number, (step, *found) in enumerate(zip(events, *own, strict=False)):
            if not is_same(memory, step, found, any_order=in_steps):
                raise Difference(f"{part}: step {number} is\n  {found}\ninstead of\n  {contents_of(step)}")
        if len(events) != len(own[0]):
            raise Difference(f"{part}: {len(own[0])} steps instead of {len(events)}")
        for one in stats:
            counted.update({kind: one[kind] for kind in KINDS})
        least.update(_counts(events))
    if isinstance(node, Base):
        most = sum(node.reference.ends, least.copy())
        if not all(least[kind] <= counted[kind] <= most[kind] for kind in KINDS):
            raise Difference(f"counted {counted}, at least {least} and at most {most} were expected")
    for base in node.bases:
        base.check()


def run_part(part: Part, datasets: list[Any], states: Any, *, meet: bool) -> tuple[list[Events], Any, list[Any]]:
    """Run a part: the events of each rank, their states behind it, and their counts.

    Args:
        states: of the ranks of the part before.
        meet: the ranks meet before each step.
    """

    def work(rank: int) -> Any:
        with get_savable_loader(datasets[rank], start_method=part.method) as loader:
            if states is not None:
                loader.restore_state_global(states)
            found, stats = delivered(loader, part.steps), dict(loader.stats())
            if part.again:
                loader.restore_state_rank(None) if states is None else loader.restore_state_global(states)
                if (other := delivered(loader, part.steps)) != found:
                    raise Difference(f"{part}: again, it is\n  {other}\ninstead of\n  {found}")
            return found, loader.save_state_rank(), stats

    results = on_ranks(part.world, work) if meet else [work(rank) for rank in range(part.world)]
    own, saved, stats = ([one[place] for one in results] for place in range(3))
    return own, json.loads(json.dumps(saved)), stats


def _counts(events: Events) -> Counter[str]:
    items = [item for event in events if event is not END for item in event if item is not None]
    return sum((item.counts for item in items), Counter())


def contents_of(step: Any) -> Any:
    return step if step is END else [None if item is None else item.content for item in step]


def is_same(memory: Memory, step: Any, found: list[Any], *, any_order: bool) -> bool:
    """Compare a step with the expected one.

    Args:
        found: what each rank got.
        any_order: which rank gets what is not promised.
    """
    if step is END or END in found:
        return all(one is END for one in (step, *found))
    contents = contents_of(step)
    orders = permutations(contents) if any_order else [contents]
    return any(all(map(lambda *pair: _matches(memory, *pair), order, found)) for order in orders)


def _matches(memory: Memory, expected: Any, found: Any) -> bool:
    return (found is None or not names_in(found)) if expected is None else memory.matches(expected, found)


@contextmanager
def starving(node: Node) -> Iterator[None]:
    """Errors of functions that lose all items which could stand in place of one: only the library draws these."""
    try:
        yield
    except FatalSampleError as error:
        if node.loses and any(base.refills for base in node.bases):
            raise Starved(error.what) from None
        raise


@contextmanager
def refusals() -> Iterator[None]:
    """Errors that say that something is not done, or cannot be done."""
    try:
        yield
    except FatalSampleError as error:
        raise Starved(error.what) from None
    except EnergonLiteError as error:
        raise Refused(f"{type(error).__name__}: {str(error).splitlines()[0]}") from None


def outcome_of(seed: int, root: Path) -> tuple[str, str]:
    """Run the pipeline of a seed: "same", "refused", "starved" or "DIFFERENT", and why."""
    pipeline = random_pipeline(seed, root)
    try:
        run(pipeline)
    except (Refused, Starved) as none:
        return type(none).__name__.lower(), re.sub(r"'[^']*'|\d+|\[.*\]", "#", str(none).replace(str(root), ""))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return "DIFFERENT", f"{described(pipeline, root)}\n{text if len(text) < 2000 else text[:2000] + '...'}"
    return "same", ""


def described(pipeline: Pipeline, root: Path) -> str:
    return f"seed {pipeline.seed}: {pipeline.node}\n{pipeline.parts}".replace(str(root), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipelines", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    parser.add_argument("--only", type=int, help="run the pipeline of this seed, and raise what is wrong")
    given = parser.parse_args()
    logging.getLogger("energon_lite").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        root = write_data(Path(folder))
        if given.only is not None:
            pipeline = random_pipeline(given.only, root)
            print(described(pipeline, root), flush=True)
            run(pipeline)
            return
        counts: Counter[tuple[str, str]] = Counter()
        for seed in range(given.seed, given.seed + given.pipelines):
            outcome, why = outcome_of(seed, root)
            if outcome == "DIFFERENT":
                print(why, end="\n\n", flush=True)
            counts[outcome, why if outcome in ("refused", "starved") else ""] += 1
            if not (seed + 1) % 100:
                print(f"up to seed {seed}", file=sys.stderr)
        for (outcome, why), count in counts.most_common():
            print(count, outcome, why)
    sys.exit(any(outcome == "DIFFERENT" for outcome, _ in counts))


if __name__ == "__main__":
    main()
