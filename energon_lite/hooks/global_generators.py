"""Global generators of random numbers: Python's, numpy's and torch's (CPU), lent to hooks, and watched.

They belong to the whole process. So a hook that uses them holds a lock, and such hooks in other threads wait for it.
Their states are saved at the first use in a scope, and restored at its end: a scope around many hooks does this once
for all of them.

The mark :func:`stateless` on a hook says whether they are seeded for it, and how many failures of it are tolerated.
"""

from __future__ import annotations

import ctypes
import os
import random
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import torch

from energon_lite.errors import UsageError

T = TypeVar("T")

#: ``numpy.random``, whose type stubs lack the exchange of bit generators.
_numpys: Any = np.random
#: The generator of the functions of ``random``.
_python: Any = getattr(random.getstate, "__self__")  # noqa: B009  # unknown to type checkers


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
        self._saved: _States | None = None

    def __enter__(self) -> LendingScope:
        self._token = _scope.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        saved = self._saved
        try:
            if saved is not None:
                try:
                    _restore(saved)
                except BaseException:  # interrupted while restoring
                    _restore(saved)
                    raise
                finally:
                    self._saved = None
                    self._lock.release()
        finally:
            _scope.reset(self._token)

    def hold(self) -> _States | None:
        """Keep the generators for this scope, and save their states, if this is the first time in the scope: then
        return the states."""
        if self._saved is not None:
            return None
        self._lock = _lock
        held: list[bool] = []
        try:
            # A single call acquires the lock and records it: an interrupt comes before both or after both.
            held.extend(map(self._lock.acquire, (True,)))
            state = torch.default_generator.get_state()
            bits = _numpys.get_bit_generator()
            self._saved = _States(_python_memory.raw, _python.gauss_next, bits, _half_of_pair(), state)
        except BaseException:
            if held:
                self._lock.release()
            raise
        _numpys.set_bit_generator(_spare_bits.pop() if _spare_bits else np.random.MT19937(0))
        return self._saved

    def seed(self, seed: int) -> None:
        """Seed all three generators with 64 bits."""
        self.hold()
        random.seed(seed)
        # Each takes 32 bits; with equal ones numpy and torch would produce the same numbers.
        np.random.seed(seed >> 32)
        # Not torch.manual_seed: that would also touch the generators of the GPUs.
        torch.default_generator.manual_seed(seed & 0xFFFFFFFF)


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
    """Return a scope that a hook may seed. Afterwards ``busy`` has to be reset, and a scope of one hook to be left."""
    scope = _scope.get()
    if scope is None or scope.busy:  # a hook in the scope may run a loader of its own: then the hook is a caller
        scope = LendingScope(of_one_hook=True).__enter__()
    scope.busy = True
    return scope


# -- states ---------------------------------------------------------------------------------------------------------
#
# Reading a state by the generator's own method takes 9 us (Python) and 38 us (numpy), as much as seeding it. Both keep
# a Mersenne Twister of 2,500 bytes in one piece; a copy of them takes 0.2 us. Numpy tells where they are; for Python,
# the place is compared with ``getstate()`` once, and not used if it is another one.

#: The Mersenne Twister: 624 words of 32 bits and a position.
_TWISTER = struct.Struct("625I")
#: The same as memory, of which ``raw`` is a copy.
_Memory = ctypes.c_char * _TWISTER.size
#: Memory of a state of torch's generator; comparing copies of it takes 1 us, ``torch.equal`` 5.
_TorchMemory = ctypes.c_char * torch.default_generator.get_state().numel()
#: Bit generator for hooks to use through ``numpy.random``: exchanging it with the caller's is faster than a copy.
_spare_bits: list[np.random.MT19937] = []
#: The last bit generator of a caller without a cached half of a pair of normal numbers, and its words.
_without_half: tuple[Any, bytes] | None = None


class _Words:
    """Memory of a generator whose place is unknown: a state takes longer to read, and is no ``bytes``."""

    @property
    def raw(self) -> Any:
        return _python.getstate()


def _find_python() -> Any:
    """Return the memory of Python's generator."""
    place = id(_python) + object.__basicsize__
    size = type(_python).__basicsize__ - object.__basicsize__
    if sys.implementation.name == "cpython" and size >= _TWISTER.size:
        memory = _Memory.from_address(place)
        position, *others = _TWISTER.unpack(memory.raw)
        if (*others, position) == _python.getstate()[1]:
            return memory
    return _Words()


_python_memory = _find_python()


class Marks:
    """Marks of the states of the global generators, which change whenever a number is drawn or a seed is set. The
    generators have to be held by a :class:`LendingScope`.

    Args:
        now: states of Python's and torch's generators that were read just now; None: they are read.

    Example:
        >>> marks = Marks()
        >>> random.random()
        >>> marks.changed()
        True
    """

    __slots__ = ("_bits", "_half", "_memory", "_numpy", "_python", "_torch")

    def __init__(self, now: _States | None = None) -> None:
        self._bits = bits = _numpys.get_bit_generator()
        self._memory = None
        if type(bits) is np.random.MT19937:  # else a hook has exchanged it
            _numpys.set_bit_generator(bits)  # without the half of a pair, which a hook could take unnoticed
            self._memory = _Memory.from_address(bits.ctypes.state_address)
            self._numpy = self._memory.raw
        self._python = _python_memory.raw if now is None else now.python
        self._half = _python.gauss_next
        state = torch.default_generator.get_state() if now is None else now.torch
        self._torch = _TorchMemory.from_address(state.data_ptr()).raw

    def changed(self) -> bool:
        """Return whether a state has changed."""
        state = torch.default_generator.get_state()
        return not (
            self._memory is not None
            and self._memory.raw == self._numpy
            and _numpys.get_bit_generator() is self._bits
            and _python_memory.raw == self._python
            and _python.gauss_next == self._half
            and _TorchMemory.from_address(state.data_ptr()).raw == self._torch
        )


class _States(NamedTuple):
    """States to restore: Python's generator and its half of a pair; numpy's bit generator and its half; torch's."""

    python: Any
    python_half: float | None
    bits: Any
    half: dict[str, Any]
    torch: torch.Tensor


def _half_of_pair() -> dict[str, Any]:
    """Return numpy's cached half of a pair of normal numbers, which is not part of the bit generator, as entries of the
    state; none if there is none. Only drawing makes one, so one without is not asked again until its words change."""
    global _without_half
    bits = _numpys.get_bit_generator()
    is_known = type(bits) is np.random.MT19937
    words = _Memory.from_address(bits.ctypes.state_address).raw if is_known else b""
    if is_known and _without_half is not None and _without_half[0] is bits and _without_half[1] == words:
        return {}
    state = np.random.get_state(legacy=False)
    half = {name: state[name] for name in ("has_gauss", "gauss")} if state["has_gauss"] else {}
    _without_half = None if half else (bits, words)
    return half


def _restore(states: _States) -> None:
    if _python_memory.raw != states.python or _python.gauss_next != states.python_half:
        words = states.python
        if isinstance(words, bytes):
            position, *others = _TWISTER.unpack(words)
            words = random.Random.VERSION, (*others, position), states.python_half
        random.setstate(words)
    lent = _numpys.get_bit_generator()
    _numpys.set_bit_generator(states.bits)
    if lent is not states.bits and type(lent) is np.random.MT19937 and not _spare_bits:
        _spare_bits.append(lent)
    if states.half:
        np.random.set_state(np.random.get_state(legacy=False) | states.half)
    torch.default_generator.set_state(states.torch)


F = TypeVar("F", bound=Callable[..., Any])


@overload
def stateless(fn: F) -> F: ...


@overload
def stateless(
    *,
    restore_seeds: bool | None = None,
    failure_tolerance: int | None = None,
    restore_task_encoder_seeds: bool = False,
) -> Callable[[F], F]: ...


def stateless(
    fn: F | None = None,
    *,
    restore_seeds: bool | None = None,
    failure_tolerance: int | None = None,
    restore_task_encoder_seeds: bool = False,
) -> Any:
    """Mark a hook as a pure function of its arguments and its randomness. Hooks without the mark are treated as such.

    Args:
        restore_seeds: the global generators of ``random``, ``numpy.random`` and ``torch`` (CPU) are seeded for this
            sample or batch before the hook runs, and restored to the caller's state afterwards. False: the hook does
            not use them. None: they are seeded if the hook draws from them; a hook that only reads or restores a state
            (``torch.initial_seed()``, ``torch.random.fork_rng()``) needs True.
        failure_tolerance: number of consecutive failures of this hook that ends the iteration; they then do not count
            for the encoder's ``failure_tolerance``. 0: no limit; None: only that of the encoder.
        restore_task_encoder_seeds: Energon 8's name for a hook that draws from ``self.rng``, which is always seeded
            here; the global generators are then left alone.

    Raises:
        UsageError: the tolerance is negative.

    Example:
        >>> class Encoder(TaskEncoder):
        ...     @stateless(restore_seeds=False, failure_tolerance=10)
        ...     def encode_sample(self, sample):
        ...         return tokenize(sample.text)
    """
    if failure_tolerance is not None and failure_tolerance < 0:
        raise UsageError(f"failure_tolerance is {failure_tolerance}", fix="give at least 1, or 0 for no limit")

    seeds = False if restore_seeds is None and restore_task_encoder_seeds else restore_seeds

    def mark(hook: Any) -> Any:
        hook.__stateless__ = True
        if fn is None:  # otherwise, marks of another decorator are kept
            hook.__restore_seeds__ = seeds
            hook.__failure_tolerance__ = failure_tolerance
        return hook

    return mark if fn is None else mark(fn)


def restores_seeds(fn: Callable[..., Any]) -> bool:
    """True if the global generators are seeded for a hook, at least if it draws from them."""
    return getattr(fn, "__restore_seeds__", None) is not False


def asks_for_seeds(fn: Callable[..., Any]) -> bool:
    """True if the global generators are seeded for a hook whether it draws from them or not."""
    return getattr(fn, "__restore_seeds__", None) is True


def failure_tolerance_of(fn: Callable[..., Any]) -> int | None:
    """Failure tolerance of a hook itself; None: it has none."""
    return getattr(fn, "__failure_tolerance__", None)
