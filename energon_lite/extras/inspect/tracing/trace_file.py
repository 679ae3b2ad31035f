"""Record of each batch: the times of its request and delivery, its worker, and the time of each stage."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import weakref
from typing import Any, TextIO

from energon_lite.batching.digests import digest_text
from energon_lite.loading.batch_observer import BatchEvent, BatchObserver, ObservedRank

__all__ = ["TraceFile"]

logger = logging.getLogger(__name__)

#: Version of the format of the lines.
FORMAT = 1


class TraceFile(BatchObserver):
    """Observer that writes a line of JSON for each delivered batch; ``energon-lite trace`` reads the file.

    Args:
        path: path of the file. With several ranks each has its own: ``trace.rank3.jsonl`` for ``trace.jsonl``; with
            files of workers, the paths must already differ by rank.
        observed: the rank and its leaves: each line identifies samples by leaf number and key. ``worker_files`` are
            paths of the files of this rank's workers, in their order: each gets a line for each delivered batch that
            its worker made.

    A file that cannot be written causes one warning; the run continues without it.
    """

    times_stages = True

    def __init__(self, path: str | os.PathLike[str], observed: ObservedRank):
        rank, world_size, workers = observed.rank, observed.world_size, observed.worker_files
        stem, end = os.path.splitext(os.fspath(path))
        self.path = f"{stem}.rank{rank}{end}" if world_size > 1 and not workers else os.fspath(path)
        self._rank = rank
        self._world = world_size
        self._lines = _Lines(self.path)
        self._workers = [_Lines(file) for file in workers]
        for number, lines in enumerate(self._workers):
            lines.write({"t": "Worker.__init__", "r": rank, "worker_number": number})
        clock = time.time() - time.monotonic()
        header = {"format": "energon_lite.trace", "version": FORMAT, "rank": rank, "pid": os.getpid(), "clock": clock}
        header["world_size"] = world_size
        self._count = 0
        header |= {"t": "SavableLoader.__init__", "r": rank}
        self._lines.write(header | {"datasets": [[leaf.name, leaf.path] for leaf in observed.leaves]})

    def on_batch(self, event: BatchEvent) -> None:
        """Write the line of a delivered batch."""
        result = event.result
        pass_number, position = event.step
        made = result.trace or {}
        keys = _keys_of(result.batch)
        step = position // self._world
        line: dict[str, Any] = {"pass": pass_number, "step": step, "asked": event.asked, "delivered": event.delivered}
        line |= {"position": position, "digest": digest_text(result.digest)}
        if made.get("worker_number", len(self._workers)) < len(self._workers):
            own = {"t": "Worker.batch", "r": self._rank, "idx": step, "global_idx": self._count, "keys": keys}
            self._workers[made["worker_number"]].write({**line, **own, **made})
        # The same record for programs that read Energon's debug files.
        line |= {"t": "SavableDataLoader.yield", "r": self._rank, "idx": step, "global_idx": self._count}
        self._count += 1
        self._lines.write(line | {"keys": keys or [key for _, key in made.get("sources", ())]} | made)


class _Lines:
    """File of JSON lines that is flushed after each line, so that it shows the last lines before a crash."""

    def __init__(self, path: str):
        self.path = path
        self._file: TextIO | None = None
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        except OSError as error:
            self._give_up(error)

    def write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        file = self._file
        self._file = None
        if file is not None:
            with contextlib.suppress(OSError):  # the same error again
                file.close()
        logger.warning(
            "the trace file %s cannot be written: %s. The run goes on without it.", self.path, error.strerror or error
        )


def _keys_of(batch: Any) -> list[str]:
    """Return the keys of the samples in a batch, if it has them."""
    key_or_keys = batch.get("__key__") if isinstance(batch, dict) else getattr(batch, "__key__", None)
    if isinstance(key_or_keys, str):
        return [key_or_keys]
    return [str(key) for key in key_or_keys] if isinstance(key_or_keys, (list, tuple)) else []
