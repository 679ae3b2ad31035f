"""Trials of ``energon-lite tune``, in a separate process that can be killed when it exceeds a limit."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, NamedTuple

from typing_extensions import Self

from energon_lite.errors import EnergonLiteError, UsageError
from energon_lite.extras.inspect.tuning.memory import memory_of
from energon_lite.extras.inspect.tuning.setting import Setting, Speed

__all__ = ["Trials", "What"]

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
    from energon_lite.cli import make_task_encoder
    from energon_lite.extras.inspect.tuning.loader_speed import LoaderSpeed

    def make(workers: int) -> Any:
        config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
        # Hooks may have state: each loader gets an encoder of its own.
        encoder = make_task_encoder(what.task_encoder) if what.task_encoder else None
        reading = Reading(trust_code=what.trust_code or None)
        return get_train_dataset(what.path, task_encoder=encoder, worker_config=config, reading=reading, **what.options)

    return LoaderSpeed(make, what.seconds)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
