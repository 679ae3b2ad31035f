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
import torch

__all__ = ["LendingScope", "borrow", "lending"]

T = TypeVar("T")

#: ``numpy.random``, whose types do not know that bits can be exchanged.
_numpys: Any = np.random


class LendingScope:
    """Hooks in this scope may be lent the global generators; whatever state these were in comes back at its end.

    Scopes may be nested: one that is opened by a hook gives that hook its generators back.

    Example:
        >>> with LendingScope():
        ...     for job in jobs:
        ...         pipeline.run(job)  # each hook draws numbers of its own, whose states nobody needs
    """

    __slots__ = ("_lock", "_saved", "_token", "busy", "of_one_hook")

    def __init__(self, *, of_one_hook: bool = False) -> None:
        self.busy = self.of_one_hook = of_one_hook  # busy: a hook has them now
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
            _numpys.set_bit_generator(_spare_bits.pop() if _spare_bits else np.random.MT19937(0))
        random.seed(seed)
        # Each takes 32 bits, and of equal ones numpy and torch would make the same numbers.
        np.random.seed(seed >> 32)
        # Not torch.manual_seed: that would also touch the generators of the GPUs.
        torch.default_generator.manual_seed(seed & 0xFFFFFFFF)

    def take_back(self) -> None:
        """The hook that they were lent to is done."""
        self.busy = False
        if self.of_one_hook:
            self.__exit__()


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


def borrow() -> LendingScope:
    """A scope that hooks may seed; :meth:`LendingScope.take_back` ends that."""
    scope = _scope.get()
    if scope is None or scope.busy:  # a hook of the scope may run a loader of its own: it is a caller, too
        scope = LendingScope(of_one_hook=True).__enter__()
    scope.busy = True
    return scope


#: For hooks to draw from through ``numpy.random``: to change places with the caller's takes less time than to copy it.
_spare_bits: list[np.random.MT19937] = []


def _states() -> tuple[Any, Any, Any]:
    # Half a pair of normal numbers may be left, which does not belong to the bits.
    numpys = np.random.get_state(legacy=False)
    return (
        random.getstate(),
        (_numpys.get_bit_generator(), numpys["has_gauss"], numpys["gauss"]),
        torch.get_rng_state(),
    )


def _restore(states: tuple[Any, Any, Any]) -> None:
    random.setstate(states[0])
    bits, has_gauss, gauss = states[1]
    lent = _numpys.get_bit_generator()
    _numpys.set_bit_generator(bits)
    if lent is not bits and type(lent) is np.random.MT19937 and not _spare_bits:
        _spare_bits.append(lent)
    if has_gauss:
        np.random.set_state(np.random.get_state(legacy=False) | {"has_gauss": has_gauss, "gauss": gauss})
    torch.set_rng_state(states[2])
