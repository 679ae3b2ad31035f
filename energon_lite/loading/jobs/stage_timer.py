"""Where the time of a batch goes: read, decode, hooks, batch. Only pipelines that are asked to are timed.

The timer takes the place of a few methods of one pipeline object. All others run as if it did not exist, so that what
is not asked for costs nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from energon_lite.loading.jobs.chunk_job import ChunkJob, Made
from energon_lite.loading.jobs.chunk_pipeline import ChunkPipeline
from energon_lite.loading.jobs.pipeline import Pipeline, Result

__all__ = ["note_transfer", "time_stages"]

#: Stages of the pipeline under another name; all others are hooks.
_STAGES = {"read": "read", "decode": "decode", "batch": "batch", "encode_batch": "batch"}


def time_stages(pipeline: Pipeline) -> None:
    """Have all results of this pipeline carry a ``trace``: plain data, seconds by the monotonic clock.

    ``worker`` (process and thread), ``began``, ``ended``, ``stages`` (seconds by stage, without those of the stages
    inside) and ``samples`` (key and seconds of each sample that was made by itself).
    """
    timer = _Timer()
    own: dict[str, Any] = {"_guarded": timer.guarded(pipeline._guarded)}
    if isinstance(pipeline, ChunkPipeline):
        own["batches"] = timer.batches(pipeline.batches)
    else:
        own["run"] = timer.run(pipeline.run)
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

    def __init__(self) -> None:
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
            result = run(job)
            result.trace = self.take()
            return result

        return timed_run

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
