"""Workers that are actors of Ray: started where their resources are, replaced and ended by Ray, reached by TCP.

An actor gets the runner of jobs once, by Ray, and a secret of this run. It listens, and is then a worker behind TCP,
whose answers the receiver takes. Jobs and answers are pickled: both sides have proved that they know the secret.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

from energon_lite.errors import UsageError
from energon_lite.extras.remote_workers.described import RayWorkers, connect_to_ray
from energon_lite.extras.remote_workers.mixed_pool import MixedPool, RemoteHandle
from energon_lite.extras.remote_workers.protocol import Card
from energon_lite.extras.remote_workers.receiver import Orders
from energon_lite.extras.remote_workers.run_card import check_card, environment
from energon_lite.extras.remote_workers.server import TrainerListener
from energon_lite.extras.remote_workers.tcp_workers import TcpHandle, TcpSource, orders_of
from energon_lite.loading.executors import transport
from energon_lite.loading.executors.executor_handle import PoolRequest
from energon_lite.loading.makers.job_runner import JobRunner

logger = logging.getLogger(__name__)

#: Seconds between two looks at the number of actors, and between two changes of it.
_LOOK, _CALM = 0.1, 2.0
#: Seconds of no need after which actors above the minimum are ended.
_IDLE = 30.0
#: Actors that may end at their start, one after the other, before a pool without other workers gives up; and the
#: longest pause between two of them, in seconds.
_FAILED, _LONGEST = 3, 60.0
#: Seconds in which a connection to an actor that has started has to be made.
_CONNECTED = 30.0
#: Bytes of a job, or an answer, at most: as many as a segment can have.
_MOST_BYTES = 1 << 40


def open_pool(request: PoolRequest) -> MixedPool:
    """Return the pool of a loader, with actors of Ray.

    Raises:
        UsageError: Ray is not installed; or the text has more than ``ray``, or ``ray://address``.
    """
    described = request.described
    if isinstance(described, str):
        described = RayWorkers(address=described if described != "ray" else None)
    assert isinstance(described, RayWorkers)
    orders = orders_of(request, _MOST_BYTES, secrets.token_bytes(32))
    return MixedPool(request, RaySource(described, request.runner, orders), described.host_load)


class Worker:
    """Actor that runs the jobs of the trainer that connects to it, in a thread.

    Args:
        runner: runner of a job.
        number: number of the worker.
        secret: secret that the trainer knows.
        card: what the trainer runs.
    """

    def __init__(self, runner: JobRunner, number: int, secret: bytes, card: Card):
        import ray

        check = partial(check_card, ours={**card, "environment": environment()})
        host = ray.util.get_node_ip_address()
        listener = TrainerListener(host, 0, runner, check, transport, secret=secret, max_bytes=_MOST_BYTES)
        self._address = listener.address
        threading.Thread(target=listener.serve, args=(number,), daemon=True).start()

    def ready(self) -> str:
        """Return the address, when the actor has started."""
        return self._address


@dataclass(eq=False)
class _Actor:
    """An actor that was started.

    Attributes:
        number: its number.
        actor: what Ray calls it.
        address: where it listens; "": it has not answered yet.
        until: time by which there has to be a connection; infinite: the actor has not answered yet, or there was one.
        worker: its handle; None: there is no connection yet.
    """

    number: int
    actor: Any
    address: str = ""
    until: float = math.inf
    worker: TcpHandle | None = None

    def kill(self) -> None:
        """End the process."""
        import ray

        with suppress(Exception):  # it has ended, or Ray has
            ray.kill(self.actor)

    def look_and_kill(self) -> None:
        """Log what Ray knows of a process whose connection has ended; end it, if it has not."""
        import ray

        try:
            ray.get(self.actor.ready.remote(), timeout=_CALM)
        except ray.exceptions.GetTimeoutError:
            pass  # it was stopped
        except Exception as error:
            logger.warning("the actor of Ray at %s is gone: %s", self.address, error)
        self.kill()


class RaySource(TcpSource):
    """Source of workers that are actors of Ray. An actor joins the pool when the receiver has connected to it.

    Args:
        workers: their description.
        runner: runner of a job.
        orders: orders to the receiver, with the secret of this run.
    """

    codec: ClassVar[ModuleType] = transport

    def __init__(self, workers: RayWorkers, runner: JobRunner, orders: Orders):
        super().__init__(orders)
        self._workers = workers
        self._runner = runner
        self._live: list[_Actor] = []
        self._wanted = workers.minimum
        self._actors = itertools.count(2000)
        self._problem: BaseException | None = None
        self._failed = 0  # actors that ended at their start since the last one that did not
        self._again = 0.0  # time of the next start
        self._short_at = self._ended_at = 0.0  # times at which more were needed, and one was ended, last

    def start(self) -> None:
        connect_to_ray(self._workers.address)  # only now, because local workers are forked
        super().start()
        threading.Thread(target=self._look, name="energon-lite-actors", daemon=True).start()

    def refusal(self) -> UsageError | None:
        if self._failed < _FAILED:
            return super().refusal()
        return UsageError(
            f"no actor of Ray can be started: {self._failed} in a row ended at their start, the last one with: "
            f"{self._problem}",
            fix="install the trainer's packages and code on the machines of the cluster, with memory for the data "
            "set; see `ray logs` for what an actor printed, and `ray status`",
        )

    def left(self, worker: RemoteHandle) -> None:
        for actor in self._drop(lambda actor: actor.worker is worker):
            threading.Thread(target=actor.look_and_kill, daemon=True).start()

    def spare(self) -> Sequence[RemoteHandle]:
        now, least = time.monotonic(), self._workers.minimum
        self._short_at = now if self.is_short else self._short_at
        if now - max(self._short_at, self._ended_at) < _IDLE or len(self._live) <= least:
            return ()
        self._ended_at = now
        self._wanted = max(least, self._wanted - 1)
        kept = self._live[: self._wanted]
        spare = self._drop(lambda actor: actor not in kept and actor.worker is not None and not actor.worker.tickets)
        for actor in spare:
            actor.kill()
        return [actor.worker for actor in spare if actor.worker is not None]

    def close(self) -> None:
        self._closed.set()
        for actor in self._drop(lambda _: True):
            actor.kill()
        super().close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _drop(self, is_dropped: Callable[[_Actor], bool]) -> list[_Actor]:
        """Forget some actors, and return them; have the receiver connect to the others."""
        with self._lock:
            dropped = [actor for actor in self._live if is_dropped(actor)]
            self._live = [actor for actor in self._live if actor not in dropped]
            addresses = [actor.address for actor in self._live if actor.address]
            if addresses != self._orders.addresses:
                self.connect_to(addresses)
        return dropped

    def _join(self, worker: TcpHandle) -> None:
        with self._lock:
            found = next((actor for actor in self._live if actor.address == worker.address), None)
            if found is not None:
                worker.number, found.worker, found.until = found.number, worker, math.inf
                self._failed = 0
        if found is None:  # it was ended meanwhile
            worker.close()
        else:
            super()._join(worker)

    def _look(self) -> None:
        """Start actors while they are needed, and end those that cannot be reached, until the source is closed."""
        import ray

        reference = None
        remote = ray.remote(Worker)
        began = 0.0
        while not self._closed.wait(_LOOK):
            now = time.monotonic()
            for actor in self._drop(lambda actor: actor.until < time.monotonic()):
                actor.kill()
                self._note(TimeoutError(f"no connection to {actor.address} was made in {_CONNECTED:g} s"))
            if now < self._again or (now - began < _CALM and len(self._live) >= self._wanted):
                continue
            if len(self._live) >= self._wanted and (self.is_short or now - self._short_at < _CALM):
                self._wanted = min(self._workers.maximum, self._wanted + 1)
            if len(self._live) >= self._wanted:
                continue
            try:
                reference = reference or ray.put(self._runner)
                resources = dict(self._workers.resources)
                number, cpus = next(self._actors), resources.pop("CPU", 1.0)
                arguments = reference, number, self._orders.secret, self._orders.card
                started = _Actor(number, remote.options(num_cpus=cpus, resources=resources).remote(*arguments))
                with self._lock:
                    self._live.append(started)
                if self._closed.is_set():
                    self.close()
                started.actor.ready.remote().future().add_done_callback(partial(self._started, started))
                began = now
            except Exception as error:
                self._note(error)

    def _started(self, actor: _Actor, answer: Any) -> None:
        """Have the receiver connect to an actor, or take note that it has ended; called by a thread of Ray."""
        if (error := answer.exception()) is None:
            actor.address, actor.until = answer.result(), time.monotonic() + _CONNECTED
            self._drop(lambda _: False)
        elif self._drop(lambda other: other is actor):
            self._note(error)

    def _note(self, error: BaseException) -> None:
        """Take note of an actor that cannot be started, and wait longer before the next one."""
        self._again = time.monotonic() + min(_LONGEST, _CALM * 2 ** min(5, self._failed))
        self._problem = error
        self._failed += 1
        self.joined.wake()
        if self._failed == _FAILED:
            logger.warning(
                "%d actors of Ray in a row ended at their start; further ones are tried less often: %s", _FAILED, error
            )
