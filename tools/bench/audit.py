"""What digests cost, and how long it takes to say when a sample was trained on.

python tools/bench/audit.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import Any

import numpy as np

from energon_lite import BestFit, Capacity
from energon_lite.batching import plan as plans
from energon_lite.batching.digests import chain_digest, set_digest
from energon_lite.batching.plan import FixedPlan
from energon_lite.batching.token_plan import PlannedChunk, TokenPlan
from energon_lite.extras.inspect.occurrences import Occurrences
from energon_lite.loading.makers.chunk_job import ChunkJob, Item
from energon_lite.loading.makers.chunk_run import ChunkRun
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.order.orders import BlendOrder
from energon_lite.order.shuffle import LeafOrder


def main() -> None:
    """Print microseconds of processor time, the best of some turns."""
    order = BlendOrder([LeafOrder(10**9, 1), LeafOrder(10**6, 2), LeafOrder(1000, 3)], [0.7, 0.2, 0.1], 0)
    for size in (1, 8, 32, 128):
        plan = FixedPlan(order, size)
        turns = [[(64 * turn + number,) for number in range(64)] for turn in range(20)]
        with_digests = seconds(partial(planned_all, plan, turns))
        hashes, sums = plans.address_hashes, plans.sums_of_groups
        plans.address_hashes, plans.sums_of_groups = _nothing, _no_sums  # type: ignore[assignment]
        without = seconds(partial(planned_all, plan, turns))
        plans.address_hashes, plans.sums_of_groups = hashes, sums
        told(f"planned micro-batch of {size} samples", (with_digests - without) / 1280)
    lengths = [np.random.default_rng(0).integers(10, 400, 10**6)] * 3
    order = BlendOrder([LeafOrder(10**6, key) for key in range(3)], [1, 1, 1], 0)
    planned = TokenPlan(order, BestFit(Capacity(4096)), lengths, chunk=1 << 15).make(0, 0)
    count = len(planned)
    all_of = seconds(lambda: planned_digests(planned))
    told(f"micro-batch of {1 << 15} // {count} samples by tokens", all_of / count)
    run, items = lane_run(256)
    told("micro-batch of 32 samples in a lane", seconds(lambda: [run.digest(items) for _ in range(100)]) / 100)
    told("chain of a step", seconds(lambda: [chain_digest(1, 2) for _ in range(100)]) / 100)
    order = BlendOrder([LeafOrder(10**9, 1), LeafOrder(10**6, 2), LeafOrder(1000, 3)], [0.7, 0.2, 0.1], 0, run=100,
                       window=10_000)  # fmt: skip
    for leaf, name in ((0, "10^9"), (1, "10^6"), (2, "1000")):
        told(
            f"history of a sample of {name}, at position 10^12, with 10 places",
            seconds(partial(history, order, leaf)),
        )


def planned_all(plan: FixedPlan, turns: list[list[tuple[int]]]) -> None:
    for places in turns:
        plan.batches(places)


def planned_digests(planned: PlannedChunk) -> list[int]:
    """What a chunk adds to find the digests of all its micro-batches."""
    planned.__dict__.pop("hashes", None)
    batches = planned.batches
    edges = batches.offsets.tolist()
    return [int(planned.hashes[batches.sample[a:b]].sum()) for a, b in pairwise(edges)]


def lane_run(size: int) -> tuple[ChunkRun, Sequence[Item]]:
    """A chunk of so many samples, and the items of a micro-batch of 32."""
    order = BlendOrder([LeafOrder(10**9, 1)], [1.0], 0)
    addresses = order.lookup(np.arange(size))
    samples: Any = JobRunner.__new__(JobRunner)
    run = ChunkRun.__new__(ChunkRun)
    run.job, run.samples, run._hashes = ChunkJob(0, 0, addresses), samples, None
    items = [Item(None, (n, 0, 0, 0), (n + 1, 0, 0, 0), (row,), 0) for n, row in enumerate(addresses.rows()[:32])]
    assert run.digest(items) == set_digest(addresses.rows()[:32])
    return run, items


def history(order: BlendOrder, leaf: int) -> tuple[int, list[int]]:
    found = Occurrences(order, leaf, 7)
    return found.count(10**12), list(islice(found.between(0, 10**12, newest=True), 10))


def seconds(work: Callable[[], Any], turns: int = 7) -> float:
    """Processor time of the fastest turn."""
    best = float("inf")
    for _ in range(turns):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


def told(what: str, value: float) -> None:
    print(f"{what:<60}{1e6 * value:12,.2f} us")


def _nothing(*_: Any) -> None:
    return None


def _no_sums(_: Any, edges: Any) -> list[int]:
    return [0] * (len(edges) - 1)


if __name__ == "__main__":
    main()
