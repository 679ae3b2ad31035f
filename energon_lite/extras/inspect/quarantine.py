"""File of the samples that were skipped or failed: one line of JSON for each, over all ranks and restarts.

A line is written when its batch is delivered. A resumed run delivers some batches a second time, later epochs bring all
samples again, and another rank may get the samples that this one had before. So a sample, identified by its data set,
its place and its stage, gets one line only. The file is locked while lines are added, and lines that other processes
have added are read first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from typing import Any

from energon_lite.loading.batch_observer import BatchObserver, ObservedRank
from energon_lite.loading.makers.outcomes import Failure
from energon_lite.order.hashing import hash_text
from energon_lite.storage.files.atomic_file import lock, unlock

logger = logging.getLogger(__name__)

#: Seconds to wait for the lock; after that, lines are added without it.
_PATIENCE = 2.0


class Quarantine(BatchObserver):
    """Observer that writes the file.

    Args:
        path: path of the file; the file and its folder are created if missing.
        observed: the rank and its leaves; the rank is written into each line.

    A full disk, or a path that cannot be written, causes one warning; the run continues, and ``lost`` counts the lines.
    """

    name = "quarantine"

    def __init__(self, path: str | os.PathLike[str], observed: ObservedRank):
        self.path = os.fspath(path)
        self._leaves = observed.leaves
        self._rank = observed.rank
        self.written = self.lost = 0
        self._read = 0  # bytes of the file that have been read
        self._known: set[int] = set()
        self._warned = False
        self._write({})  # reads the file, and finds out at the start whether it can be written

    def stats(self) -> dict[str, Any]:
        """Return the path, the lines written by this loader, and the lines that could not be written."""
        return {"path": self.path, "written": self.written, "lost": self.lost}

    def on_lost(self, lost: Sequence[Failure]) -> None:
        """Write a line for each sample that has none yet."""
        made = [self._line(failure) for failure in lost]
        lines = {_identity(line): line for line in made}
        for identity in self._known.intersection(lines):
            del lines[identity]
        if lines:
            self._write(lines)

    def _write(self, lines: dict[int, dict[str, Any]]) -> None:
        try:
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                lock(file, _PATIENCE)  # some network file systems have no locks, and nothing may hang here
                self._append(file, lines)
            finally:
                unlock(file)
                os.close(file)
        except OSError as error:
            self.lost += len(lines)
            if not self._warned:
                logger.warning(
                    "the quarantine file %s cannot be written: %s. The run goes on; samples that fail are counted in "
                    "stats(), and are missing in the file until it can be written again.",
                    self.path,
                    error.strerror or error,
                )
            self._warned = True

    def _append(self, file: int, lines: dict[int, dict[str, Any]]) -> None:
        cut = self._catch_up(file)
        new = [line for identity, line in lines.items() if identity not in self._known]
        data = b"".join(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n" for line in new)
        if not data:
            return
        data = b"\n" + data if cut else data  # a full disk or a crash cut the line before
        done = 0
        while done < len(data):
            done += os.write(file, data[done:])
        self.written += len(new)
        self._catch_up(file)

    def _catch_up(self, file: int) -> bool:
        """Read the lines that were added since the last call. Return whether the last line is incomplete."""
        size = os.fstat(file).st_size
        if size < self._read:  # the file was truncated
            self._read = 0
            self._known.clear()
        data = bytearray()
        while len(data) < size - self._read and (more := os.pread(file, size - self._read, self._read + len(data))):
            data += more
        whole = data.rfind(b"\n") + 1
        for text in data[:whole].splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a line that was cut, or has another format
                self._known.add(_identity(json.loads(text)))
        self._read += whole
        return whole < len(data)

    def _line(self, failure: Failure) -> dict[str, Any]:
        place: dict[str, Any] = {"key": failure.key, "leaf": failure.leaf, "path": None, "shard": None, "index": None}
        if failure.address is not None:
            leaf, index, _ = failure.address
            source = self._leaves[leaf].source
            shard = source.shard_names[source.locate(index)[0]]
            place = {"key": source.key(index), "leaf": self._leaves[leaf].name, "path": source.path, "shard": shard}
            place["index"] = index
        why = {"stage": failure.stage, "error": failure.reason, "skipped": failure.skipped, "rank": self._rank}
        restore_key = None if failure.address is None else ["sample", *failure.address, 0]
        return {**place, **why, "restore_key": restore_key}


def _identity(line: dict[str, Any]) -> int:
    """Return a 64-bit hash of the entries that identify a line."""
    return hash_text(json.dumps([line["path"], line["shard"], line["key"], line["stage"]]))
