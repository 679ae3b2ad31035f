"""Marks on hooks: seeding of the global generators, and tolerance of failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from energon_lite.errors import UsageError

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
