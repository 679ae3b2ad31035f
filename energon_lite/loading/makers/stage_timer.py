"""Where the time of a batch goes (read, decode, hooks, batch), and which samples are in it, also inside of packs. Only
pipelines that are asked to are timed.

The timer takes the place of a few methods of one pipeline object. All others run as if it did not exist, so that what
is not asked for costs nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from energon_lite.loading.makers.chunk_job import ChunkJob, Made
from energon_lite.loading.makers.chunk_pipeline import Bundle, ChunkPipeline
from energon_lite.loading.makers.chunk_samples import Item
from energon_lite.loading.makers.pipeline import Address, Leaf, Pipeline, Result

__all__ = ["note_transfer", "time_stages"]

#: Stages of the pipeline under another name; all others are hooks.
_STAGES = {"read": "read", "decode": "decode", "batch": "batch", "encode_batch": "batch"}


def time_stages(pipeline: Pipeline) -> None:
    """Have all results of this pipeline carry a ``trace``: plain data, seconds by the monotonic clock.

    ``worker`` (process and thread), ``began``, ``ended``, ``stages`` (seconds by stage, without those of the stages
    inside), ``samples`` (key and seconds of each sample that was made by itself) and ``sources`` (number of the data
    set and key of each sample that is in the batch, whatever hooks made of it).
    """
    timer = _Timer(pipeline.leaves)
    own: dict[str, Any] = {"_guarded": timer.guarded(pipeline._guarded)}
    if isinstance(pipeline, ChunkPipeline):
        own["batches"] = timer.batches(pipeline.batches)
        own["items"] = timer.items(pipeline.items)
        own["_batches_of"] = timer.batches_of(pipeline._batches_of)
    else:
        own["run"] = timer.run(pipeline.run)
        own["_fill_place"] = timer.fill_place(pipeline._fill_place)
    if pipeline._columns is not None:
        timer.enter_columns(pipeline._columns)
    pipeline.__dict__.update(own)


def note_transfer(result: Result, began: float, ended: float) -> None:
    """The result was received in this time."""
    made = result.batch if isinstance(result.batch, list) else []
    found = [result.trace, *(one.trace for one in made if isinstance(one, Made))]
    for trace in found:
        if trace is not None:
            trace["received"] = ended
            trace["stages"]["transfer"] = ended - began
            return


class _Timer:
    """Times what goes on in one thread."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._leaves = leaves
        self._sources: Sequence[Address | None] = ()  # addresses of the samples in the batch that is being made
        self._inside = 0.0  # seconds in stages inside the running one
        self._reading = 0.0  # seconds of the sample whose key is not known yet
        self._began = 0.0
        self._stages: dict[str, float] = defaultdict(float)
        self._samples: dict[tuple[str, str], float] = defaultdict(float)

    def start(self) -> None:
        self._inside = self._reading = 0.0
        self._stages.clear()
        self._samples.clear()
        self._began = time.monotonic()

    def take(self) -> dict[str, Any]:
        return {
            "worker": [os.getpid(), threading.current_thread().name],
            "began": self._began,
            "ended": time.monotonic(),
            "stages": dict(self._stages),
            "samples": [[key, seconds] for (_, key), seconds in self._samples.items()],
            "sources": [[one[0], self._leaves[one[0]].source.key(one[1])] for one in self._sources if one is not None],
        }

    def timed(self, stage: str, step: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        """What a step returns, and the seconds it took."""
        outside, self._inside = self._inside, 0.0
        began = time.monotonic()
        took = 0.0
        try:
            value = step(*arguments)
        finally:
            took = time.monotonic() - began
            self._stages[stage] += took - self._inside
            self._inside = outside + took
        return value, took

    def guarded(self, guarded: Callable[..., Any]) -> Callable[..., Any]:
        def step(stage: str, leaf: str, key: str, *rest: Any) -> Any:
            value, took = self.timed(_STAGES.get(stage, "hooks"), guarded, stage, leaf, key, *rest)
            if stage == "read":
                self._reading = took  # under the number of the sample: its key comes with it
            elif leaf != "*":
                self._samples[leaf, key] += took + self._reading
                self._reading = 0.0
            return value

        return step

    def run(self, run: Callable[..., Result]) -> Callable[..., Result]:
        def timed_run(job: Any) -> Result:
            self.start()
            self._sources = job.addresses  # as planned, unless places are filled one by one
            result = run(job)
            if not any(isinstance(outcome, int) for outcome in result.outcomes):
                self._sources = ()
            result.trace = self.take()
            return result

        return timed_run

    def fill_place(self, fill: Callable[..., Any]) -> Callable[..., Any]:
        def step(address: Address, attempt: int, outcomes: Any, places: list[Address]) -> Any:
            self._sources = places
            return fill(address, attempt, outcomes, places)

        return step

    def items(self, items: Callable[..., Iterator[Item]]) -> Callable[..., Iterator[Item]]:
        def noted(*arguments: Any) -> Iterator[Item]:
            for item in items(*arguments):
                self._sources = (*item.origins, *item.more_of)
                yield item

        return noted

    def batches_of(self, batches_of: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def step(bundle: Bundle, *rest: Any) -> list[Any]:
            made = batches_of(bundle, *rest)
            self._sources = [origin for item in bundle.items for origin in (*item.origins, *item.more_of)]
            return made

        return step

    def batches(self, batches: Callable[[ChunkJob], Iterator[Made]]) -> Callable[[ChunkJob], Iterator[Made]]:
        def timed_batches(job: ChunkJob) -> Iterator[Made]:
            made = batches(job)
            while True:
                self.start()
                one = next(made, None)
                if one is None:
                    return
                yield replace(one, trace=self.take())

        return timed_batches

    def enter_columns(self, columns: Any) -> None:
        """Time the quick way, where there are no samples by themselves."""

        def within(owner: Any, method: str, stage: str) -> None:
            step = getattr(owner, method)
            setattr(owner, method, lambda *arguments: self.timed(stage, step, *arguments)[0])

        within(columns, "batch", "batch")
        for leaf in columns.leaves:
            if leaf is not None:
                within(leaf, "read", "decode")
                within(leaf.reader, "read", "read")
