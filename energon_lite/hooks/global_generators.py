"""Lending of Python's, numpy's and torch's global generators to hooks: seeded for each hook, restored after it.

The generators belong to the whole process. So a hook that uses them holds a lock, and such hooks in other threads wait
for it. Their states are saved at the first use in a scope, and restored at its end: a scope around many hooks saves and
restores once for all of them.
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

#: ``numpy.random``, whose type stubs lack the exchange of bit generators.
_numpys: Any = np.random


class LendingScope:
    """Scope in which hooks may use the global generators; their earlier states are restored at its end.

    Scopes may be nested: a scope that a hook opens restores that hook's generators.

    Example:
        >>> with LendingScope():
        ...     for job in jobs:
        ...         pipeline.run(job)  # each hook gets its own seed, so states need not be restored in between
    """

    __slots__ = ("_lock", "_saved", "_token", "busy", "of_one_hook")

    def __init__(self, *, of_one_hook: bool = False) -> None:
        self.busy = self.of_one_hook = of_one_hook  # busy: a hook uses the generators now
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
        except BaseException:  # interrupted while restoring
            _restore(saved)
            raise
        finally:
            self._saved = None
            self._lock.release()

    def seed(self, seed: int) -> None:
        """Seed all three generators with 64 bits; save their states first, if this is the first time in the scope."""
        if self._saved is None:
            self._lock = _lock
            held: list[bool] = []
            try:
                # A single call acquires the lock and records it: an interrupt comes before both or after both.
                held.extend(map(self._lock.acquire, (True,)))
                self._saved = _states()
            except BaseException:
                if held:
                    self._lock.release()
                raise
            _numpys.set_bit_generator(_spare_bits.pop() if _spare_bits else np.random.MT19937(0))
        random.seed(seed)
        # Each takes 32 bits; with equal ones numpy and torch would produce the same numbers.
        np.random.seed(seed >> 32)
        # Not torch.manual_seed: that would also touch the generators of the GPUs.
        torch.default_generator.manual_seed(seed & 0xFFFFFFFF)

    def take_back(self) -> None:
        """End the use of the generators by a hook."""
        self.busy = False
        if self.of_one_hook:
            self.__exit__()


def lending(values: Iterator[T]) -> Iterator[T]:
    """Yield the same values, each made in a scope of its own; in between the caller's generators are restored."""
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
    """Replace the lock in a forked process, where the thread that may hold it does not exist."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def borrow() -> LendingScope:
    """Return a scope that a hook may seed, until :meth:`LendingScope.take_back`."""
    scope = _scope.get()
    if scope is None or scope.busy:  # a hook in the scope may run a loader of its own: then the hook is a caller
        scope = LendingScope(of_one_hook=True).__enter__()
    scope.busy = True
    return scope


#: Bit generator for hooks to use through ``numpy.random``: exchanging it with the caller's is faster than a copy.
_spare_bits: list[np.random.MT19937] = []


def _states() -> tuple[Any, Any, Any]:
    # A cached half of a pair of normal numbers is not part of the bit generator.
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
