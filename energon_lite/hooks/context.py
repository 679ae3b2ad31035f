"""Where a running hook is, and its own randomness."""

from __future__ import annotations

from contextvars import ContextVar

from energon_lite.errors import UsageError
from energon_lite.hooks.global_generators import lend
from energon_lite.hooks.randomness import HookGenerator
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

    __slots__ = ("_loan", "_origin", "_rng", "_seed", "batch_index", "sample_index")

    def __init__(self, *origin: int, sample_index: int | None = None, batch_index: int | None = None):
        self._origin = origin
        self.sample_index = sample_index
        self.batch_index = batch_index
        self._seed: int | None = None
        self._rng: HookGenerator | None = None
        self._loan: lend | None = None

    @property
    def seed(self) -> int:
        """64 bits."""
        if self._seed is None:
            self._seed = hash_ints(*self._origin)
        return self._seed

    @property
    def rng(self) -> HookGenerator:
        """Made at the first call; goes on from there for all hooks that run here."""
        if self._rng is None:
            self._rng = HookGenerator(self.seed)
        return self._rng

    def seed_globals(self) -> None:
        """Seed Python's, numpy's and torch's global generators, once; they go on from there, as ``rng`` does."""
        if self._loan is None:
            self._loan = lend(self.seed)

    def end(self) -> None:
        """Put back the global generators, if they were seeded."""
        if self._loan is not None:
            loan, self._loan = self._loan, None
            loan.end()


_context: ContextVar[HookContext | None] = ContextVar("energon_lite_hook", default=None)


class hook_context:
    """Run hooks as the loader does; tests of task encoders may use it too.

    Args:
        context: where they are.
        seeds: seed the global generators at once; else whoever runs the hooks does so before the first that may draw.

    Example:
        >>> with hook_context(HookContext(1)):
        ...     encoded = encoder.encode_sample(sample)
    """

    __slots__ = ("_context", "_seeds", "_token")

    def __init__(self, context: HookContext, *, seeds: bool = True):
        self._context, self._seeds = context, seeds

    def __enter__(self) -> HookContext:
        self._token = _context.set(self._context)
        if self._seeds:
            self._context.seed_globals()
        return self._context

    def __exit__(self, *_: object) -> None:
        _context.reset(self._token)
        self._context.end()


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
