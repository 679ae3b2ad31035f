"""Context of a running hook: its sample or batch, and its randomness."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from typing_extensions import Self

from energon_lite.errors import UsageError
from energon_lite.order.hashing import hash_ints, hash_next
from energon_lite.storage.stores.lazy import CachePool, NoCachePool
from energon_lite.worker_config import ACTIVE_CONFIG, WorkerConfig

__all__ = [
    *("HookContext", "HookGenerator", "LendingScope", "PythonGenerator", "borrow", "current_context", "hook_context"),
    *("lending", "running_context"),
]

T = TypeVar("T")

#: ``numpy.random``, whose type stubs lack the exchange of bit generators.
_numpys: Any = np.random
#: Tag of Python's stream, which keeps the streams apart.
_PYTHON = 1
#: Tag of torch's stream.
_TORCH = 2
#: Cached hash of the leading integers of an origin, which many samples share.
_hash_of_beginning = lru_cache(maxsize=256)(hash_ints)
_NO_CACHE = NoCachePool()


class HookContext:
    """Indices and randomness that a running hook can request.

    Hooks run inside the context (``with``). One context serves many samples: :meth:`move` takes it from one sample (or
    batch) to the next.

    Args:
        origin: integers that identify this sample (or batch): the seed of the run, the leaf, the epoch, the index.
            Their hash seeds all of the hook's randomness; it is computed on first use.
        sample_index: number of the sample in its leaf's stream (epoch * length + index), in sample hooks.
        batch_index: number of the micro-batch in its pass, counted over all ranks.
        cache: the loader's cache pool; None: a pool that stores nothing.
        worker_config: the loader's worker configuration, returned by ``WorkerConfig.active_worker_config``.

    Attributes:
        asked: the number that a hook has asked for: "sample" or "batch"; "": none.
    """

    __slots__ = (
        *("_lent", "_origin", "_rng", "_seed", "_seeded", "_token", "_token_of_config"),
        *("asked", "batch_index", "cache", "sample_index", "worker_config"),
    )

    def __init__(
        self,
        *origin: int,
        sample_index: int | None = None,
        batch_index: int | None = None,
        cache: CachePool | None = None,
        worker_config: WorkerConfig | None = None,
    ):
        self.worker_config = worker_config
        self.cache = _NO_CACHE if cache is None else cache
        self._lent: LendingScope | None = None
        self.move(*origin, sample_index=sample_index, batch_index=batch_index)

    def move(self, *origin: int, sample_index: int | None = None, batch_index: int | None = None) -> Self:
        """Move the context to another sample (or batch)."""
        if self._lent is not None and self._lent.of_one_hook:
            self._take_back()
        self._origin = origin
        self._seeded = False
        self._seed: int | None = None
        self._rng: HookGenerator | None = None
        self.asked = ""
        self.sample_index = sample_index
        self.batch_index = batch_index
        return self

    def __enter__(self) -> Self:
        self._token: Token[HookContext | None] = _context.set(self)
        self._token_of_config = ACTIVE_CONFIG.set(self.worker_config or ACTIVE_CONFIG.get())
        return self

    def __exit__(self, *_: object) -> None:
        _context.reset(self._token)
        ACTIVE_CONFIG.reset(self._token_of_config)
        if self._lent is not None:
            self._take_back()

    def _take_back(self) -> None:
        lent, self._lent, self._seeded = self._lent, None, False
        if lent is not None:
            lent.take_back()

    @property
    def seed(self) -> int:
        """Seed of this sample (or batch), 64 bits."""
        if self._seed is None:
            *beginning, last = self._origin
            self._seed = hash_next(_hash_of_beginning(*beginning), last)
        return self._seed

    @property
    def rng(self) -> HookGenerator:
        """Generator of this sample (or batch), made on first use; all hooks of the sample continue its stream."""
        if self._rng is None:
            self._rng = HookGenerator(self.seed)
        return self._rng

    def seed_globals(self) -> None:
        """Seed Python's, numpy's and torch's global generators once; later hooks continue their streams."""
        if self._lent is None:
            self._lent = borrow()
        if not self._seeded:
            self._lent.seed(self.seed)
            self._seeded = True

    def has_drawn(self) -> bool:
        """Return whether hooks asked for ``rng`` or drew from a global generator since the last :meth:`move`.

        The global generators are seeded anew.
        """
        if self._rng is not None or not self._seeded or self._lent is None:
            return self._rng is not None
        now = _drawn_states()
        self._lent.seed(self.seed)
        return now != _drawn_states()


_context: ContextVar[HookContext | None] = ContextVar("energon_lite_hook", default=None)


@contextmanager
def hook_context(context: HookContext) -> Iterator[HookContext]:
    """Run hooks as the loader does, for tests of task encoders.

    Args:
        context: context of the hooks. The global generators are seeded at once.

    Example:
        >>> with hook_context(HookContext(1)):
        ...     encoded = encoder.encode_sample(sample)
    """
    with context:
        context.seed_globals()
        yield context


def current_context(what: str) -> HookContext:
    """Return the running hook's context.

    Raises:
        UsageError: no hook is running.
    """
    context = _context.get()
    if context is None:
        raise UsageError(
            f"{what} was asked for outside of a hook",
            fix="use it in encode_sample, batch or encode_batch while a loader runs them, or inside hook_context(...)",
        )
    return context


#: The running hook's context, or None outside of a loader.
running_context = _context.get


# -- generator of a hook --------------------------------------------------------------------------------------------


class HookGenerator(np.random.Generator):
    """Numpy generator with a seed of 64 bits, which also has a ``random.Random`` and a ``torch.Generator``.

    Each of the three draws from a stream of its own; the other two are made on first use.

    Example:
        >>> rng = HookGenerator(7)
        >>> rng.integers(10), rng.random(3)  # numpy's
        >>> rng.random.choice(["left", "right"])  # Python's
        >>> torch.rand(3, generator=rng.torch)
    """

    def __init__(self, seed: int):
        super().__init__(np.random.Philox(key=seed))
        self._seed = seed
        self._python: PythonGenerator | None = None
        self._torch: torch.Generator | None = None

    def __reduce__(self) -> Any:
        return np.random.Generator, (self.bit_generator,)

    @property
    def numpy(self) -> np.random.Generator:
        """The generator itself."""
        return self

    @property
    def random(self) -> PythonGenerator:
        """Python's generator; called, it acts as numpy's method of this name."""
        if self._python is None:
            self._python = PythonGenerator(hash_ints(self._seed, _PYTHON), super().random)
        return self._python

    @property
    def torch(self) -> torch.Generator:
        """Torch's generator, on the CPU."""
        if self._torch is None:
            self._torch = torch.Generator()
            self._torch.manual_seed(hash_ints(self._seed, _TORCH) >> 1)
        return self._torch


class PythonGenerator(random.Random):
    """A ``random.Random`` with a seed, which can also be called like the ``random`` method of a numpy generator.

    Args:
        seed: 64 bits.
        numbers: ``numpy.random.Generator.random``, to which calls are forwarded.
    """

    def __new__(cls, seed: int, numbers: Any) -> PythonGenerator:
        return super().__new__(cls, seed)  # type: ignore[call-arg]  # object's, for mypy

    def __init__(self, seed: int, numbers: Any):
        self._numbers = numbers
        super().__init__(seed)

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        return self._numbers(*arguments, **more)


# -- global generators ----------------------------------------------------------------------------------------------
#
# The generators belong to the whole process. So a hook that uses them holds a lock, and such hooks in other threads
# wait for it. Their states are saved at the first use in a scope, and restored at its end: a scope around many hooks
# saves and restores once for all of them.


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


def _drawn_states() -> tuple[Any, ...]:
    """Return states of the global generators that can be compared."""
    _, (bits, *gauss), torchs = _states()
    numpys = bits.state["state"]
    return random.getstate(), numpys["key"].tobytes(), numpys["pos"], *gauss, torchs.numpy().tobytes()


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
