"""Units of sharded jobs, such as those of ``prepare``, as tasks of Ray: ``energon-lite prepare data --ray``.

A task does one unit, and writes its result file into the folder that all machines see. Units are pure, and files are
replaced atomically, so Ray may run a task again, also while its first run still writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

from energon_lite.errors import EnergonLiteError, UsageError, WorkerError
from energon_lite.extras.remote_workers.described import connect_to_ray
from energon_lite.storage.sharded_job import Runner
from energon_lite.storage.sharded_work import Outcome, U

#: Fewest tasks that wait or run, and tasks for each processor of the cluster.
_LEAST, _PER_CPU = 64, 4
#: Most runs of a task whose process or machine has ended, after the first one.
_AGAIN = 3
#: In a process of Ray: the last runner, by its reference.
_runners: dict[str, Runner[Any]] = {}


def run_units(run: Runner[U], address: str, units: Sequence[U]) -> Generator[tuple[U, Outcome], None, None]:
    """Do units in tasks of Ray; a failed unit does not stop the others.

    Args:
        run: does units in the process that calls it.
        address: address of the cluster; "": the one that this process is connected to, or that Ray finds.
        units: the units to do.

    Yields:
        Each unit, when it is done, with its outcome.

    Raises:
        UsageError: Ray is not installed, or there is no cluster at the address.
        EnergonLiteError: an error that is that of no single unit.
    """
    if address and ":" not in address:
        raise UsageError(f"--ray {address}", fix="write --ray=HOST:PORT; --ray without an address goes to the end")
    ray = connect_to_ray(address or None)
    shared = ray.put(ray.cloudpickle.dumps(run))
    task = ray.remote(_do).options(max_retries=_AGAIN)
    left, running = deque(units), dict[Any, U]()
    try:
        while left or running:
            most = max(_LEAST, int(_PER_CPU * ray.cluster_resources().get("CPU", 0)))
            while left and len(running) < most:
                unit = left.popleft()
                running[task.remote([shared], unit)] = unit
            (done, *_), _ = ray.wait(list(running))
            unit = running.pop(done)
            try:
                outcome = ray.get(done)
            except ray.exceptions.RayError as error:
                text = f"the task of Ray for {unit} could not be done: {error}"
                outcome = WorkerError(text, fix="run again: what is done is kept; look at `ray status`")
            if isinstance(outcome, _Raised):
                raise outcome.error
            yield unit, outcome
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


class _Raised:
    """An error that ends the job.

    Args:
        error: the error.
    """

    def __init__(self, error: EnergonLiteError):
        self.error = error


def _do(shared: list[Any], unit: Any) -> Outcome | _Raised:
    """Do a unit: the body of a task."""
    import ray

    (reference,) = shared
    name = reference.hex()
    if name not in _runners:
        _runners.clear()
        _runners[name] = ray.cloudpickle.loads(ray.get(reference))
    try:
        ((_, outcome),) = _runners[name]([unit])
        return outcome
    except EnergonLiteError as error:
        return _Raised(error)
