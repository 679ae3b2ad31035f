"""Context of a running hook: its sample or batch, and its randomness."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from typing_extensions import Self

from energon_lite.errors import UsageError
from energon_lite.hooks.global_generators import LendingScope, Marks, borrow
from energon_lite.order.hashing import hash_ints, hash_next
from energon_lite.storage.stores import CachePool, NoCachePool
from energon_lite.worker_config import ACTIVE_CONFIG, WorkerConfig

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
        seeds: the global generators are seeded for hooks, see :meth:`watch`.
    """

    __slots__ = (
        *("_drew", "_lent", "_marks", "_origin", "_rng", "_seed", "_seeded", "_token"),
        *("_token_of_config", "asked", "batch_index", "cache", "sample_index", "seeds", "worker_config"),
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
        self._marks: Marks | None = None
        self._drew = False
        self.seeds = True
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
            lent.busy = False
            if lent.of_one_hook:
                lent.__exit__()

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
        if self._seeded or not self.seeds:
            return
        if self._lent is None:
            self._lent = borrow()
        if self._marks is not None:
            self._drew = self._drew or self._marks.changed()
        self._lent.seed(self.seed)
        self._seeded = True
        self._marks = None if self._marks is None else Marks()

    def watch(self, *, seeds: bool) -> bool:
        """Watch the global generators until :meth:`drew` is called; return False if other threads may use them.

        Args:
            seeds: seed them as usual; False: hooks run without seeds, and have to run again if they drew.
        """
        if self._lent is None:
            self._lent = borrow()
        if self._lent.of_one_hook:
            return False
        self._marks = Marks(self._lent.hold())
        self._drew, self.seeds = False, seeds
        return True

    @property
    def lacks_seeds(self) -> bool:
        """True if a number was drawn from a global generator that was watched, but not seeded."""
        return not self.seeds and self._marks is not None and self._marks.changed()

    def drew(self) -> bool:
        """Stop watching; return whether a number was drawn from a global generator."""
        drew = self._drew or (self._marks is not None and self._marks.changed())
        self._marks, self.seeds = None, True
        return drew

    def has_drawn(self) -> bool:
        """Return whether hooks asked for ``rng`` or drew from a global generator since the last :meth:`move`.

        The global generators are seeded anew.
        """
        if self._rng is not None or not self._seeded or self._lent is None:
            return self._rng is not None
        marks = Marks()
        self._lent.seed(self.seed)
        return marks.changed()


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
