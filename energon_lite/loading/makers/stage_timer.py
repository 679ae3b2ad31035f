"""Where the time of a batch goes (read, decode, hooks, batch), and which samples are in it, also inside of packs. Only
pipelines that are asked to are timed."""

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

#: Stages of the pipeline under another name; all others are hooks.
_STAGES = {"read": "read", "decode": "decode", "decode_columns": "decode", "batch": "batch", "encode_batch": "batch"}
#: Steps of many samples of a data set at once.
_OF_SEVERAL = frozenset({"read", "decode_columns"})


def stage_of(step: str) -> str:
    """The stage that a step belongs to: ``read``, ``decode``, ``hooks`` or ``batch``."""
    return _STAGES.get(step, "hooks")


class StageTimer:
    """An observer in one thread that says where the time went, as plain data, seconds by the monotonic clock.

    ``worker`` (process and thread), ``worker_number``, ``began``, ``ended``, ``stages`` (seconds by stage), ``samples``
    (key and seconds of each sample that was made by itself) and ``sources`` (number of the data set and key of each
    sample that is in the batch, whatever hooks made of it).

    Args:
        leaves: the data sets, in the order's numbering.
        number: of the worker, among those of its rank.
    """

    sees_samples = False
    times_samples = True

    def __init__(self, leaves: Sequence[Leaf], number: int = 0) -> None:
        self._leaves = leaves
        self._number = number
        self._began = self._since = 0.0
        self._at: tuple[str, str, str] | None = None  # the step that is being taken
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
            "sources": [[one[0], self._leaves[one[0]].source.key(one[1])] for one in addresses if one is not None],
        }

    def _close(self, now: float) -> None:
        """The step that was begun last has ended."""
        if self._at is not None:
            stage, leaf, key = self._at
            self._stages[stage_of(stage)] += now - self._since
            if leaf != "*" and stage not in _OF_SEVERAL:
                self._samples[leaf, key] += now - self._since


def note_transfer(result: Result, began: float, ended: float) -> None:
    """The result was received in this time."""
    made = result.batch if isinstance(result.batch, list) else []
    found = [result.trace, *(one.trace for one in made if isinstance(one, Made))]
    for trace in found:
        if trace is not None:
            trace["received"] = ended
            trace["stages"]["transfer"] = ended - began
            return
