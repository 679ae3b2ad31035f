"""Scan many shards at once, on all cores.

The helpers are plain child processes that speak pickles over their own pipes, not a ``multiprocessing`` pool, for
three reasons: nothing of the caller is forked or imported again, so a script without ``if __name__ == "__main__"`` and
a process that holds threads or a GPU may call this; they do not import torch, so they start in a tenth of a second; and
when the caller dies, even by SIGKILL, their standard input ends and they leave.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from energon_lite.errors import DatasetError
from energon_lite.storage.index.nv_meta import write_tar_index
from energon_lite.storage.prepare.scan_cache import write_piece
from energon_lite.storage.tar.tar_scan import ShardScan, scan_shard

__all__ = ["ScanResult", "scan_shards"]

#: A shard's contents, or why it cannot be used.
ScanResult = ShardScan | DatasetError

#: Seconds of work that are not worth starting helpers for: small data sets need none. 0: leave all work to helpers.
_ALONE = 0.3

_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from energon_lite.storage.prepare.scan_pool import serve; serve()"


def scan_shards(
    root: str,
    names: Sequence[str],
    *,
    workers: int | None = None,
    write_indexes: bool = True,
    progress: Callable[[str], None] | None = None,
) -> list[ScanResult]:
    """Scan shards; one that cannot be used does not keep the others from being scanned.

    Args:
        root: the data set's folder.
        names: shards, relative to it.
        workers: processes at most; None for one per core.
        write_indexes: also write each shard's ``.tar.idx`` and its piece. They are not flushed to the disk yet.
        progress: called in this thread with the name of each shard that is done.

    Returns:
        Per shard, in the order of ``names``, its contents or the error.
    """
    workers = max(1, workers or os.cpu_count() or 1)
    done: dict[str, ScanResult] = {}
    left = deque(names)
    start = time.monotonic()

    def scan_here(name: str) -> float:
        begin = time.monotonic()
        done[name] = _scan(root, name, write_indexes)
        if progress:
            progress(name)
        return time.monotonic() - begin

    # The first shard warms up; it takes longer than the others would.
    while left and (workers == 1 or len(left) == 1 or (len(done) < 2 and time.monotonic() - start < _ALONE)):
        last = scan_here(left.popleft())
    while left and done and last * len(left) < _ALONE:
        last = scan_here(left.popleft())
    if left:
        _scan_with_helpers(root, left, min(workers, len(left)), write_indexes, done, progress, scan_here)
    return [done[name] for name in names]


def _scan(root: str, name: str, write_indexes: bool) -> ScanResult:
    try:
        scan = scan_shard(root, name)
        if write_indexes:
            write_tar_index(root, scan, flush=False)
            write_piece(root, scan)
        return scan
    except DatasetError as error:
        return error
    except OSError as error:
        path = error.filename or os.path.join(root, name)
        return DatasetError(f"{error.strerror or error}", where=path, fix="check permissions and free space")


def _scan_with_helpers(
    root: str,
    left: deque[str],
    workers: int,
    write_indexes: bool,
    done: dict[str, ScanResult],
    progress: Callable[[str], None] | None,
    scan_here: Callable[[str], object],
) -> None:
    """``workers`` at once, of which this process is one: it works while its helpers start."""
    results: queue.SimpleQueue[tuple[str, ScanResult]] = queue.SimpleQueue()
    helpers: list[subprocess.Popen[bytes]] = []
    threads = [
        threading.Thread(target=_drive_helper, args=(root, left, write_indexes, results, helpers), daemon=True)
        for _ in range(workers - 1 if _ALONE else workers)
    ]
    wanted = len(done) + len(left)
    for thread in threads:
        thread.start()
    try:
        while len(done) < wanted:
            if _ALONE and results.empty():
                try:
                    mine = left.popleft()
                except IndexError:  # the helpers have the last ones
                    pass
                else:
                    scan_here(mine)
                    continue
            name, result = results.get()
            done[name] = result
            if progress:
                progress(name)
    finally:
        left.clear()
        for helper in helpers:
            helper.kill()
        for thread in threads:
            thread.join()


def _drive_helper(
    root: str,
    left: deque[str],
    write_indexes: bool,
    results: queue.SimpleQueue[tuple[str, ScanResult]],
    helpers: list[subprocess.Popen[bytes]],
) -> None:
    """Body of a thread: give one helper after the other shard, and replace it if it dies."""
    helper: subprocess.Popen[bytes] | None = None
    while True:
        try:
            name = left.popleft()
        except IndexError:
            break
        try:
            if helper is None:
                helper = _start_helper()
                helpers.append(helper)
            results.put((name, _ask(helper, root, name, write_indexes)))
        except Exception as error:  # an answer may be anything, and somebody waits for a result
            code = _stop(helper)
            helper = None
            results.put((name, _died(root, name, code, error)))
    _stop(helper)


def _start_helper() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _BOOT, *sys.path]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _ask(helper: subprocess.Popen[bytes], root: str, name: str, write_indexes: bool) -> ScanResult:
    assert helper.stdin is not None and helper.stdout is not None  # both were asked for as pipes
    pickle.dump((root, name, write_indexes), helper.stdin)
    helper.stdin.flush()
    result: ScanResult = pickle.load(helper.stdout)
    return result


def _stop(helper: subprocess.Popen[bytes] | None) -> int | None:
    if helper is None:
        return None
    for pipe in (helper.stdin, helper.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # flushing to a helper that is dead already
                continue
    return helper.wait()


def _died(root: str, name: str, code: int | None, error: Exception) -> DatasetError:
    how = "could not be started" if code is None else f"died (exit code {code})" if code else "gave no answer"
    why = "" if isinstance(error, (EOFError, BrokenPipeError)) else f": {error}"
    return DatasetError(
        f"the process that scanned the shard {how}{why}",
        where=os.path.join(root, name),
        fix="run again, with a smaller --num-workers if memory was short",
    )


def serve() -> None:
    """Body of a helper process: scan what standard input asks for until it ends."""
    # Ctrl+C goes to all processes of the terminal; the caller deals with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing printed by accident may get between the replies
    while True:
        try:
            root, name, write_indexes = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            pickle.dump(_scan(root, name, write_indexes), replies)
            replies.flush()
        except BrokenPipeError:
            return
