"""Running a function on several ranks at once, each a forked process in one gloo group."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

Job = Callable[[int], Any]
DIED = (False, "died without a word")
#: Seconds after which ranks that hang are killed; a machine that is busy slows others down, and should kill none.
LIMIT = 300.0
#: Seconds that a collective waits for a peer.
GROUP_LIMIT = 240.0
#: Seconds that the others have to say what they saw when one has failed; while that one lives, they may hang.
MOMENT = 20.0


class RunRanks(Protocol):
    def __call__(self, world: int, fn: Job, timeout: float = LIMIT, *, moment: float = MOMENT) -> list[Any]: ...


class RankFailure(AssertionError):
    """A rank raised, died or was too slow. The message has each rank's traceback; ``by_rank`` has them apart."""

    def __init__(self, by_rank: dict[int, str]):
        self.by_rank = by_rank
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in sorted(by_rank.items())))


def run_ranks(
    world: int, fn: Job, timeout: float = LIMIT, *, folder: Path, group: bool = True, moment: float = MOMENT
) -> list[Any]:
    """``[fn(0), ..., fn(world - 1)]``, called at once on the ranks of a group.

    Args:
        world: number of ranks. One rank gets no process group, as in a plain script.
        fn: called with the rank; needs no pickling. What it returns is pickled.
        folder: for a temporary folder in which the ranks meet.
        group: make a process group of them; without it, ``fn`` makes its own.
        timeout: seconds until all are killed.
        moment: the same, once a rank has failed.

    Raises:
        RankFailure: any rank raised, died or was still running at the end.
    """
    context = multiprocessing.get_context("fork")
    # A folder of its own: a file left by another group would be taken for this one's.
    room = Path(tempfile.mkdtemp(dir=folder, prefix="ranks-"))
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    # No rank leaves before all are done: its peers may still be connecting to it.
    leave = context.Pipe(duplex=False)
    processes = [
        context.Process(target=_rank_main, args=(rank, world, fn, room, pipes[rank][1], leave, group))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for _, write in pipes:
        write.close()
    try:
        results, failures = _collect([read for read, _ in pipes], processes, timeout, moment)
        for rank in set(range(world)) - results.keys() - failures.keys():
            failures[rank] = "still running at the end; killed\n" + _stacks(processes[rank].pid, room, rank)
    finally:
        leave[1].close()
        leave[0].close()
        for process in processes:
            process.join(1.0)
            process.kill()
            process.join()
        for read, _ in pipes:
            read.close()
    if failures:
        raise RankFailure(failures)
    return [results[rank] for rank in range(world)]


def _collect(
    readers: list[Connection], processes: list[ForkProcess], timeout: float, moment: float
) -> tuple[dict[int, Any], dict[int, str]]:
    """Results and failures by rank, until all have spoken or time is up."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    silent = dict(enumerate(readers))
    while silent and time.monotonic() < deadline:
        wait(list(silent.values()), 0.1)
        for rank, reader in list(silent.items()):
            # In this order: what a rank said before it ended is heard. The end of its pipe would not do, because
            # processes that it has started hold the pipe open.
            ended = processes[rank].exitcode is not None
            if reader.poll():
                good, value = _message(reader)
            elif ended:
                good, value = DIED
            else:
                continue
            del silent[rank]
            (results if good else failures)[rank] = value
            if not good:
                # The others will fail too, or hang; they get a moment to say what they saw.
                deadline = min(deadline, time.monotonic() + moment)
    return results, failures


def _message(reader: Connection) -> tuple[bool, Any]:
    try:
        good, value = pickle.loads(reader.recv_bytes())
    except EOFError:
        return DIED
    return good, value


def _stacks(pid: int | None, room: Path, rank: int) -> str:
    """Where a rank hangs, as it tells itself."""
    if pid is not None:
        os.kill(pid, signal.SIGQUIT)
        time.sleep(0.2)
    return (room / f"stacks-{rank}").read_text()


def _rank_main(
    rank: int, world: int, fn: Job, room: Path, pipe: Connection, leave: tuple[Connection, Connection], group: bool
) -> None:
    # The test runner's handlers are not ours.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.register(signal.SIGQUIT, file=open(room / f"stacks-{rank}", "w"))  # noqa: SIM115
    torch.set_num_threads(1)
    leave[1].close()
    try:
        if world > 1 and group:
            store = dist.FileStore(str(room / "meeting"), world)
            limit = timedelta(seconds=GROUP_LIMIT)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        message = pickle.dumps((True, fn(rank)))
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(message)
    pipe.close()
    leave[0].poll(None)  # until the test closes its end
    # Not through the interpreter's exit: exit handlers and buffers belong to the parent.
    os._exit(0)
