"""Trials of ``energon-lite tune``: speed and memory of a loader, in a separate process, which is killed when it
exceeds a limit."""

from __future__ import annotations

import json
import os
import re
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import Self

from energon_lite.errors import EnergonLiteError, UsageError
from energon_lite.extras.inspect.tuning.search import Setting, Speed
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.recipes import get_savable_loader

__all__ = ["LoaderSpeed", "Trials", "What", "available_memory", "memory_of"]


#: Share of a measurement's seconds that is spent on warming up.
_START = 0.25
#: The fewest batches per worker in a measurement, and the factor of its seconds that it may take to get them.
_BATCHES = 6
_LONGER = 2.5


class LoaderSpeed:
    """Measures settings one after the other. Each continues in the data where the previous one stopped.

    Args:
        make_dataset: function from a number of workers to a data set.
        seconds: seconds per setting; longer if batches are slow.
        most_batches: the most batches per setting.

    Example:
        >>> measure = LoaderSpeed(lambda workers: get_train_dataset(path, worker_config=config_of(workers), ...), 2.0)
        >>> measure(Setting(workers=4)).samples
        1204.3
    """

    def __init__(self, make_dataset: Callable[[int], SavableDataset], seconds: float, most_batches: int = 1 << 30):
        self._make = make_dataset
        self._seconds = seconds
        self._most = most_batches
        self._state: Any = None

    def __call__(self, setting: Setting) -> Speed:
        """Measure a setting. One that the data set or its hooks do not support has no speed, but an error.

        Raises:
            EnergonLiteError: the data set cannot be loaded at all.
        """
        dataset = self._make(setting.workers)
        try:
            loader = get_savable_loader(dataset, prefetch_factor=setting.prefetch, start_method=setting.start_method)
        except UsageError as error:
            if not setting.workers:
                raise
            return Speed(setting, 0.0, error=error.what)
        with loader:
            if self._state is not None:
                loader.restore_state_rank(self._state)
            batches = self._endless(loader)
            next(batches)
            began, count = time.monotonic(), 0
            # Batches that are ready already arrive faster than they are made.
            ready = min(self._most, setting.workers * (setting.prefetch + 1))
            while count < ready or (time.monotonic() - began < _START * self._seconds and count < self._most):
                next(batches)
                count += 1
            times, samples = self._times(loader, batches, setting)
            stats, memory = loader.stats(), memory_of(os.getpid())
            self._state = loader.save_state_rank()
        slope = _slope(times, 3 * max(1, setting.workers))
        return Speed(setting, slope * samples / (len(times) - 1), slope, memory, stats["bottleneck"])

    def _times(self, loader: Any, batches: Iterator[Any], setting: Setting) -> tuple[list[float], int]:
        """Return the arrival times of batches, and the number of samples in all but the first."""
        before, began = loader.stats()["samples"], time.monotonic()
        times, wanted = [began], max(4, _BATCHES * setting.workers)
        while (seconds := times[-1] - began) < self._seconds * _LONGER and len(times) <= self._most:
            if seconds >= self._seconds and len(times) > wanted:
                break
            next(batches)
            times.append(time.monotonic())
        while len(times) < 3:
            next(batches)
            times.append(time.monotonic())
        return times, loader.stats()["samples"] - before

    @staticmethod
    def _endless(loader: Any) -> Iterator[Any]:
        while True:
            before = loader.stats()["batches"]
            yield from loader
            if loader.stats()["batches"] == before:
                raise UsageError("the data set has no batch", fix="use smaller batches, or more data")


def _slope(times: Sequence[float], least: int) -> float:
    """Return batches per second: the slope of their number, because batches of several workers arrive in bursts.

    With ``least`` batches in each third, the median of the thirds excludes a temporary load of the machine.
    """
    parts = np.array_split(np.array(times), 3 if len(times) >= 3 * max(4, least) else 1)
    return float(np.median([np.polyfit(part, np.arange(len(part)), 1)[0] for part in parts]))


#: Files with a container's memory limit and usage, for both versions of control groups.
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def memory_of(process: int, *, quickly: bool = False) -> int:
    """Return the bytes of a process and its children, with shared memory counted once; 0 if unknown.

    Args:
        process: number of the process.
        quickly: True for an estimate in microseconds, in which shared memory counts for each process.
    """
    return sum(_quick(number) if quickly else _exact(number) for number in _tree(process))


def available_memory() -> int | None:
    """Return the bytes that this machine, or container, has left; None if unknown."""
    limits = []
    with suppress(OSError, TypeError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        limits.append(1024 * int(re.search(r"^MemAvailable:\s*(\d+)", text, re.MULTILINE)[1]))  # type: ignore[index]
    for limit, used in _GROUPS:
        with suppress(OSError, ValueError):  # "max": no limit
            limits.append(max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
    return min(limits, default=None)


def _tree(process: int) -> Iterator[int]:
    yield process
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{process}/task"):
            with suppress(OSError):
                for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split():
                    yield from _tree(int(child))


def _exact(process: int) -> int:
    with suppress(OSError):
        text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii", errors="replace")
        return 1024 * sum(int(size) for size in re.findall(r"^Pss:\s*(\d+)", text, re.MULTILINE))
    return 0


def _quick(process: int) -> int:
    with suppress(OSError, ValueError):
        _, resident, shared, *_ = Path(f"/proc/{process}/statm").read_text().split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
    return 0


#: Seconds between two measurements of a trial's memory.
_LOOK = 0.25
#: Time limit in seconds in addition to the measured time: to import, to open, to start workers, to fill queues.
_PATIENCE = 120.0
#: Number of characters that are shown of the output of a process that ended.
_SAID = 3000
_FIX = "load it yourself, without workers, first"


class _Ended(NamedTuple):
    """Reason for a missing answer, and the memory that was in use, in bytes."""

    error: str
    memory: int = 0


@dataclass(frozen=True)
class What:
    """Data set and arguments of its loader.

    Args:
        path: path of the data set or blend.
        task_encoder: ``module:Class``; empty: the default one.
        options: further arguments of ``get_train_dataset``.
        trust_code: allow the files to name code that is run.
        seconds: time for which each setting is measured.
    """

    path: str
    task_encoder: str
    options: dict[str, Any]
    trust_code: bool
    seconds: float


class Trials:
    """Runner of trials, one after the other, in one process that is restarted when necessary.

    Args:
        what: the data set.
        memory: bytes above which a trial is ended; None: no limit.

    Example:
        >>> with Trials(what, memory=4 << 30) as trials:
        ...     trials(Setting(workers=2)).samples
        531.2
    """

    def __init__(self, what: What, memory: int | None):
        self._what = what
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115

    def __call__(self, setting: Setting) -> Speed:
        """Measure the speed of the loader with a setting, or find the reason why it cannot run.

        Raises:
            UsageError: the data set cannot be loaded at all.
        """
        process = self._running()
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # the reason is in its last output
            process.stdin.write(json.dumps(asdict(setting)).encode() + b"\n")
            process.stdin.flush()
        answer = self._answer(process)
        if isinstance(answer, dict):
            return Speed(**{**answer, "setting": setting})
        return Speed(setting, 0.0, memory=answer.memory, error=answer.error)

    def _answer(self, process: subprocess.Popen[bytes]) -> dict[str, Any] | _Ended:
        """Wait for the next answer of the process, or for its end.

        Raises:
            UsageError: the data set cannot be loaded at all.
        """
        deadline = time.monotonic() + _PATIENCE + 10 * self._what.seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._results, selectors.EVENT_READ)
            while not selector.select(_LOOK):
                most = self._too_much(process.pid)
                if most or time.monotonic() > deadline:
                    self.close()
                    return _Ended("it took too much memory" if most else "it hung", most)
        line = self._results.readline()
        if not line:
            return self._ended(process)
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise UsageError(answer["failed"], where=self._what.path, fix=_FIX)
        return answer

    def close(self) -> None:
        """End the process and its workers."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()  # the kernel ends the workers, too
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
        self._results.close()

    def __enter__(self) -> Self:
        self._running()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._log.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            ours, theirs = os.pipe()
            command = [
                sys.executable,
                "-m",
                "energon_lite.extras.inspect.tuning.trials",
                json.dumps(asdict(self._what)),
                str(theirs),
            ]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=self._log, stderr=subprocess.STDOUT, pass_fds=(theirs,)
            )
            os.close(theirs)
            self._results = open(ours, encoding="utf-8")  # noqa: SIM115
            self._answer(self._process)  # imports are finished, so that they do not count for the first trial
        if self._process is None:
            raise UsageError("the loader could not be started", where=self._what.path, fix=_FIX)
        return self._process

    def _too_much(self, process: int) -> int:
        """Memory of a process with its workers, in bytes, if it is above the limit; else 0."""
        if self._memory is None or memory_of(process, quickly=True) <= self._memory:
            return 0
        used = memory_of(process)
        return used if used > self._memory else 0

    def _ended(self, process: subprocess.Popen[bytes]) -> _Ended:
        code = process.wait()
        self.close()
        if code < 0:
            return _Ended(f"it was ended by signal {-code}")
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _SAID))
        said = self._log.read().decode(errors="replace").strip()
        raise UsageError(f"the loader ended with exit code {code}:\n{said}", where=self._what.path, fix=_FIX)


# -- in the process of the tries --------------------------------------------------------------------------------------


def _main(what: str, results: int) -> None:
    asked = What(**json.loads(what))
    with open(results, "w", encoding="utf-8", buffering=1) as answers:
        os.set_inheritable(results, False)
        try:
            measure = _measuring(asked)
            answers.write("{}\n")
            for line in sys.stdin:
                setting = Setting(**json.loads(line))
                answers.write(json.dumps(asdict(measure(setting))) + "\n")
        except EnergonLiteError as error:
            answers.write(json.dumps({"failed": str(error)}) + "\n")


def _measuring(what: What) -> Any:
    from energon_lite import Reading, WorkerConfig, get_train_dataset
    from energon_lite.cli.task_encoder_argument import make_task_encoder

    def make(workers: int) -> Any:
        config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
        # Hooks may have state: each loader gets an encoder of its own.
        encoder = make_task_encoder(what.task_encoder) if what.task_encoder else None
        reading = Reading(trust_code=what.trust_code or None)
        return get_train_dataset(what.path, task_encoder=encoder, worker_config=config, reading=reading, **what.options)

    return LoaderSpeed(make, what.seconds)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
