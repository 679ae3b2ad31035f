"""Timing of each batch by stage (read, decode, hooks, batch), with the samples in it, also those inside of packs.
Pipelines are only timed on request."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from energon_lite.loading.makers.chunk_job import Made
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.outcomes import Address, Result

__all__ = ["StageTimer", "note_transfer", "stage_of"]

#: Pipeline stage of each step that is not a hook.
_STAGES = {"read": "read", "decode": "decode", "decode_columns": "decode", "batch": "batch", "encode_batch": "batch"}
#: Steps that process many samples of a leaf at once.
_OF_SEVERAL = frozenset({"read", "decode_columns"})


def stage_of(step: str) -> str:
    """Return the stage that a step belongs to: ``read``, ``decode``, ``hooks`` or ``batch``."""
    return _STAGES.get(step, "hooks")


class StageTimer:
    """Observer in one thread that records the time of each stage, as plain data, in seconds of the monotonic clock.

    A record has ``worker`` (process and thread), ``worker_number``, ``began``, ``ended``, ``stages`` (seconds by
    stage), ``samples`` (key and seconds of each sample that was made by itself) and ``sources`` (leaf number and key of
    each sample in the batch, before packing).

    Args:
        leaves: the leaves, in the order's numbering.
        number: number of the worker among those of its rank.
    """

    sees_samples = False
    times_samples = True

    def __init__(self, leaves: Sequence[Leaf], number: int = 0) -> None:
        self._leaves = leaves
        self._number = number
        self._began = self._since = 0.0
        self._at: tuple[str, str, str] | None = None  # the running step
        self._stages: dict[str, float] = defaultdict(float)
        self._samples: dict[tuple[str, str], float] = defaultdict(float)

    def begin(self) -> None:
        self._at = None
        self._stages.clear()
        self._samples.clear()
        self._began = time.monotonic()

    def step(self, stage: str, leaf: str, key: str) -> None:
        now = time.monotonic()
        self._close(now)
        self._at = (stage, leaf, key)
        self._since = now

    def end(self, addresses: Sequence[Address | None]) -> dict[str, Any]:
        now = time.monotonic()
        self._close(now)
        self._at = None
        return {
            "worker": [os.getpid(), threading.current_thread().name],
            "worker_number": self._number,
            "began": self._began,
            "ended": now,
            "stages": dict(self._stages),
            "samples": [[key, seconds] for (_, key), seconds in self._samples.items()],
            "sources": [
                [address[0], self._leaves[address[0]].source.key(address[1])]
                for address in addresses
                if address is not None
            ],
        }

    def _close(self, now: float) -> None:
        """End the step that was begun last."""
        if self._at is not None:
            stage, leaf, key = self._at
            self._stages[stage_of(stage)] += now - self._since
            if leaf != "*" and stage not in _OF_SEVERAL:
                self._samples[leaf, key] += now - self._since


def note_transfer(result: Result, began: float, ended: float) -> None:
    """Store the time in which a result was received in its trace."""
    made = result.batch if isinstance(result.batch, list) else []
    traces = [result.trace, *(batch.trace for batch in made if isinstance(batch, Made))]
    for trace in traces:
        if trace is not None:
            trace["received"] = ended
            trace["stages"]["transfer"] = ended - began
            return
