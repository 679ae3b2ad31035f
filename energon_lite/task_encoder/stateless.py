"""Marking hooks as pure, and giving them seeded global generators."""

from __future__ import annotations

import functools
import inspect
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, overload

import numpy as np

from energon_lite.task_encoder.context import running_context

__all__ = ["stateless"]

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


@overload
def stateless(fn: F) -> F: ...


@overload
def stateless(*, restore_seeds: bool = False, failure_tolerance: int | None = None) -> Callable[[F], F]: ...


def stateless(fn: F | None = None, *, restore_seeds: bool = False, failure_tolerance: int | None = None) -> Any:
    """Mark a hook as a pure function of its arguments and of its randomness.

    Args:
        restore_seeds: seed the global generators of ``random``, ``numpy.random`` and ``torch`` (CPU) for this very
            sample or batch before the hook runs, and put the caller's generators back afterwards.
        failure_tolerance: has no effect, with a warning; set ``TaskEncoder.failure_tolerance``.

    Example:
        >>> class Encoder(TaskEncoder):
        ...     @stateless(restore_seeds=True)
        ...     def encode_sample(self, sample):
        ...         return jitter(sample, random.random())
    """
    if failure_tolerance is not None:
        logger.warning("stateless(failure_tolerance=...) has no effect: set failure_tolerance of the task encoder")
    if fn is None:
        return functools.partial(stateless, restore_seeds=restore_seeds)
    if not restore_seeds:
        fn.__stateless__ = True  # type: ignore[attr-defined]
        return fn
    if inspect.isgeneratorfunction(inspect.unwrap(fn)):
        return _seeded_generator(fn)

    @functools.wraps(fn)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        context = running_context()
        if context is None:  # called by the user, outside of a loader: nothing to seed from
            return fn(*args, **kwargs)
        with _seeded_globals(context.seed):
            return fn(*args, **kwargs)

    seeded.__stateless__ = seeded.__seeds_globals__ = True  # type: ignore[attr-defined]
    return seeded


def _seeded_generator(fn: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """The same for a hook with ``yield``: it runs to its end at once, so that nobody else draws in between."""

    @functools.wraps(fn)
    def seeded(*args: Any, **kwargs: Any) -> Iterator[Any]:
        context = running_context()
        if context is None:
            yield from fn(*args, **kwargs)
            return
        values: list[Any] = []
        failure: Exception | None = None
        with _seeded_globals(context.seed):
            try:
                for value in fn(*args, **kwargs):
                    values.append(value)  # kept even if the next one fails
            except Exception as error:
                failure = error
        yield from values
        if failure is not None:
            raise failure

    seeded.__stateless__ = seeded.__seeds_globals__ = True  # type: ignore[attr-defined]
    return seeded


@contextmanager
def _seeded_globals(seed: int) -> Iterator[None]:
    import torch

    saved = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        # Not torch.manual_seed: that would also touch the CUDA generators.
        torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
        yield
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])
        torch.set_rng_state(saved[2])
