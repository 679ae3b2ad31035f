"""Python's, numpy's and torch's global generators, lent to hooks: seeded for each of them, and given back after it.

The generators belong to the whole process. So a hook that has them holds a lock, and other hooks that want them, in
other threads, wait for it. Their states are saved when a scope lends them for the first time, and come back at its end:
a scope around many hooks saves and restores once for all of them.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np

__all__ = ["LendingScope", "lend", "lending"]

T = TypeVar("T")


class LendingScope:
    """Hooks in this scope may be lent the global generators; whatever state these were in comes back at its end.

    Scopes may be nested: one that is opened by a hook gives that hook its generators back.

    Example:
        >>> with LendingScope():
        ...     for job in jobs:
        ...         pipeline.run(job)  # each hook draws numbers of its own, whose states nobody needs
    """

    __slots__ = ("_lock", "_saved", "_token", "busy")

    def __init__(self) -> None:
        self.busy = False  # a hook has them now
        self._lock: Any = None
        self._saved: tuple[Any, Any, Any] | None = None

    def __enter__(self) -> LendingScope:
        self._token = _scope.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._saved is not None:
                self._give_back(self._saved)
        finally:
            _scope.reset(self._token)

    def _give_back(self, saved: tuple[Any, Any, Any]) -> None:
        try:
            _restore(saved)
        except BaseException:  # an interrupt in the middle of it
            _restore(saved)
            raise
        finally:
            self._saved = None
            self._lock.release()

    def seed(self, seed: int) -> None:
        """Seed all three with 64 bits; first save what they were, if this is the scope's first time."""
        if self._saved is None:
            self._lock = _lock
            held: list[bool] = []
            try:
                # One call takes it and notes that it did: an interrupt comes before both or after both.
                held.extend(map(self._lock.acquire, (True,)))
                self._saved = _states()
            except BaseException:
                if held:
                    self._lock.release()
                raise
        _seed(seed)


def lending(values: Iterator[T]) -> Iterator[T]:
    """The same values, each made in a scope; between them the caller has its generators."""
    while True:
        with LendingScope():
            try:
                value = next(values)
            except StopIteration:
                return
        yield value


_scope: ContextVar[LendingScope | None] = ContextVar("energon_lite_lending_scope", default=None)
_lock = threading.RLock()


def _renew_lock() -> None:
    """In a forked process: whoever held the lock in another thread does not exist here."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class lend:
    """Have the global generators seeded from now on; :meth:`end` puts back what was there.

    Args:
        seed: 64 bits.
    """

    __slots__ = ("_own", "_scope")

    def __init__(self, seed: int):
        scope = _scope.get()
        self._own = scope is None or scope.busy  # a hook of the scope may run a loader of its own: it is a caller, too
        self._scope = LendingScope().__enter__() if scope is None or scope.busy else scope
        self._scope.busy = True
        try:
            self._scope.seed(seed)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        self._scope.busy = False
        if self._own:
            self._scope.__exit__()


def _states() -> tuple[Any, Any, Any]:
    import torch

    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _restore(states: tuple[Any, Any, Any]) -> None:
    import torch

    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def _seed(seed: int) -> None:
    import torch

    random.seed(seed)
    # Each takes 32 bits, and of equal ones numpy and torch would make the same numbers.
    np.random.seed(seed >> 32)
    # Not torch.manual_seed: that would also touch the generators of the GPUs.
    torch.default_generator.manual_seed(seed & 0xFFFFFFFF)
