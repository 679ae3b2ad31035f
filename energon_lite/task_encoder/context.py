"""Where a running hook is, and its own randomness."""

from __future__ import annotations

from contextvars import ContextVar

import numpy as np

from energon_lite.errors import UsageError
from energon_lite.order.hashing import hash_ints

__all__ = ["HookContext", "current_context", "hook_context", "running_context"]


class HookContext:
    """What a running hook can ask about where it is: indices and its own randomness.

    Args:
        origin: integers that tell this sample (or batch) from all others: the seed of the run, the leaf, the epoch,
            the index. Their hash seeds all of the hook's randomness; it is made when first asked for.
        sample_index: number of the sample in its leaf's stream (epoch * length + index), in sample hooks.
        batch_index: number of the micro-batch in its pass, counted over all ranks.
    """

    __slots__ = ("_origin", "_rng", "batch_index", "sample_index")

    def __init__(self, *origin: int, sample_index: int | None = None, batch_index: int | None = None):
        self._origin = origin
        self.sample_index = sample_index
        self.batch_index = batch_index
        self._rng: np.random.Generator | None = None

    @property
    def seed(self) -> int:
        """64 bits."""
        return hash_ints(*self._origin)

    @property
    def rng(self) -> np.random.Generator:
        """Made at the first call; goes on from there within one hook's run."""
        if self._rng is None:
            self._rng = np.random.Generator(np.random.Philox(key=self.seed))
        return self._rng


_context: ContextVar[HookContext | None] = ContextVar("energon_lite_hook", default=None)


class hook_context:
    """Run hooks as the loader does; tests of task encoders may use it too.

    Example:
        >>> with hook_context(HookContext(1)):
        ...     encoded = encoder.encode_sample(sample)
    """

    __slots__ = ("_context", "_token")

    def __init__(self, context: HookContext):
        self._context = context

    def __enter__(self) -> HookContext:
        self._token = _context.set(self._context)
        return self._context

    def __exit__(self, *_: object) -> None:
        _context.reset(self._token)


def current_context(what: str) -> HookContext:
    """The running hook's context.

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


def running_context() -> HookContext | None:
    """The running hook's context, or None outside of a loader."""
    return _context.get()
