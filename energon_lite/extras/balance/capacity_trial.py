"""Trials of ``energon-lite profile``: real steps with one capacity, in a separate process; and the search for the
largest capacity that fits.

The process is separate because remains of an earlier trial (cached blocks, fragments, a partly built optimizer) would
be counted, and because running out of memory may end the process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.imports import find_named

#: Seconds between two measurements of a process's memory.
_LOOK = 0.02
#: Time limit in seconds for asking a GPU for its memory.
_ASKING = 120.0
#: Texts of errors for lack of memory. Libraries below PyTorch raise a plain RuntimeError.
_NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Trial:
    """Arguments of a trial.

    Args:
        function: ``module:name``; see :mod:`energon_lite.extras.balance.profile_command`.
        capacity: argument of the function.
        steps: number of steps.
        device: ``cpu`` or ``cuda``.
        limit: largest number of bytes to use; None: the memory of the device.
    """

    function: str
    capacity: int
    steps: int
    device: str
    limit: int | None


@dataclass(frozen=True)
class Outcome:
    """Result of a trial.

    Args:
        fits: True if it ran within the limit.
        peak: largest number of bytes in use; 0 if unknown.
        seconds: time of the fastest step; 0 if none was finished.
        error: error of a step, except lack of memory.
    """

    fits: bool
    peak: int = 0
    seconds: float = 0.0
    error: str = ""


def run_trial(trial: Trial, timeout: float) -> Outcome:
    """Run a trial in a separate process.

    Raises:
        UsageError: the function fails for another reason than lack of memory, or takes too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "output.txt")
        command = [
            sys.executable,
            "-m",
            "energon_lite.extras.balance.capacity_trial",
            json.dumps(asdict(trial)),
            str(result),
        ]
        with open(log, "wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            try:
                peak = _watch(process, trial, timeout)
            finally:
                process.kill()
                process.wait()
        if peak is not None:
            return Outcome(False, peak)
        if result.exists():
            outcome = Outcome(**json.loads(result.read_text(encoding="utf-8")))
        elif process.returncode < 0:
            return Outcome(False)  # killed: by the system, which ran out of memory
        else:
            said = log.read_text(encoding="utf-8", errors="replace")[-4000:].strip()
            outcome = Outcome(False, error=said or f"exit status {process.returncode}")
        if outcome.error:
            what = f"{trial.function}({trial.capacity}) failed, and not because memory ran out:\n{outcome.error}"
            raise UsageError(what, fix="call it yourself with a small capacity until it works")
        return outcome


def device_memory(device: str) -> int | None:
    """Memory of the device in bytes; None: unknown, or the device does not answer.

    The query runs in a separate process, because it takes some of the memory.
    """
    if device != "cuda":
        return None
    command = [sys.executable, "-c", "import torch; print(torch.cuda.mem_get_info()[1])"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ASKING)
    except subprocess.TimeoutExpired:
        return None
    return int(answer.stdout) if answer.returncode == 0 else None


def _watch(process: subprocess.Popen[bytes], trial: Trial, timeout: float) -> int | None:
    """Wait for the end of a process; return its bytes if it exceeded the limit, else None."""
    start = time.monotonic()
    while process.poll() is None:
        if time.monotonic() - start > timeout:
            raise UsageError(
                f"{trial.function}({trial.capacity}) has been running for {timeout:g} s",
                fix="give a longer --timeout, or fewer --steps",
            )
        if trial.device == "cpu" and trial.limit is not None:
            peak = _peak_of(process.pid)
            if peak > trial.limit:
                return peak
        time.sleep(_LOOK)
    return None


def _peak_of(process: int | str) -> int:
    """Largest number of bytes that a process has used; 0 if the system does not report it."""
    with suppress(OSError):  # the process has ended, or the system has no such file
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
        match = re.search(r"^VmHWM:\s*(\d+)", status, re.MULTILINE)
        return 1024 * int(match[1]) if match else 0
    return 0


# -- in the process of a trial ----------------------------------------------------------------------------------------


def _try(trial: Trial) -> Outcome:
    example, wanted = "energon-lite profile train:step", "a function of a capacity"
    function = find_named(trial.function, option="profile", form="module:function", example=example, wanted=wanted)
    if not callable(function):
        raise UsageError(f"{trial.function} is not a function", fix=f"name {wanted}")
    peak, wait = _limited_cuda(trial.limit) if trial.device == "cuda" else (_own_peak, lambda: None)
    try:
        seconds = _run_steps(function, trial.capacity, trial.steps, wait)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in _NO_MEMORY):
            raise
        return Outcome(False, peak())
    return Outcome(trial.limit is None or peak() <= trial.limit, peak(), seconds)


def _run_steps(function: Callable[[int], Any], capacity: int, steps: int, wait: Callable[[], None]) -> float:
    """Time of the fastest step, in seconds."""
    step: Callable[[], Any] | None = None
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        made = function(capacity) if step is None else step()
        if step is None and callable(made):  # the first call built the model, and returned the step
            step, start = made, time.perf_counter()
            step()
        wait()
        times.append(time.perf_counter() - start)
    return min(times)


def _own_peak() -> int:
    """Largest number of bytes that this process has used."""
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _peak_of("self") or (most if sys.platform == "darwin" else most * 1024)


def _limited_cuda(limit: int | None) -> tuple[Callable[[], int], Callable[[], None]]:
    """Limit the CUDA allocator to ``limit`` bytes.

    Returns:
        A function that returns the allocator's peak in bytes, and one that waits for the device.
    """
    from torch import cuda

    if limit is not None:
        cuda.set_per_process_memory_fraction(min(1.0, limit / cuda.mem_get_info()[1]))
    return cuda.max_memory_reserved, cuda.synchronize


def _main(trial: str, result: str) -> None:
    try:
        outcome = _try(Trial(**json.loads(trial)))
    except Exception as error:
        outcome = Outcome(False, error=str(error) if isinstance(error, UsageError) else traceback.format_exc())
    Path(result).write_text(json.dumps(asdict(outcome)), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])


def largest_fitting(
    fits: Callable[[int], bool], *, start: int = 1024, most: int = 1 << 20, multiple: int = 1, precision: float = 0.01
) -> int:
    """Largest capacity that fits: double until a trial fails, then bisect.

    Args:
        fits: True if a capacity fits; if one does not fit, no larger one may.
        start: the first capacity to try.
        most: the largest capacity to try.
        multiple: only multiples of this number are tried.
        precision: the result is at most this share, or one ``multiple``, below the largest that fits.

    Returns:
        The largest tried capacity that fits; 0 if none does.

    Raises:
        UsageError: the range holds no capacity to try.

    Example:
        >>> largest_fitting(lambda capacity: capacity <= 5000, start=1000, most=100_000, precision=0.0)
        5000
    """
    if multiple < 1 or start < 1 or most < multiple:
        raise UsageError(f"there is no multiple of {multiple} from {start} to {most}", fix="give positive numbers")
    top = most // multiple
    good, bad = 0, None
    probe = min(top, max(1, start // multiple))
    while bad is None:
        if not fits(probe * multiple):
            bad = probe
        elif probe == top:
            return probe * multiple
        else:
            good, probe = probe, min(top, 2 * probe)
    while bad - good > max(1, int(good * precision)):
        probe = (good + bad) // 2
        if fits(probe * multiple):
            good = probe
        else:
            bad = probe
    return good * multiple
