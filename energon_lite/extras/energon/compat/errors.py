"""Energon's error handling functions, for wrappers that other people wrote."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from energon_lite.errors import FatalSampleError, SkipSample
from energon_lite.extras.energon import error_handlers
from energon_lite.extras.energon.compat.samples import get_source_info
from energon_lite.loading.makers.hook_errors import FATAL

__all__ = [
    "SYSTEM_EXCEPTIONS",
    "ErrorContext",
    "handle_restore_errors",
    "legacy_handler",
    "log_exception",
    "reraise_exception",
]

#: Errors that are never caused by a sample.
SYSTEM_EXCEPTIONS = (*FATAL, MemoryError, ReferenceError)


class ErrorContext:
    """Counter of consecutive failures of one processing step.

    Args:
        name: name of the step, for messages.
        handler: function ``(error, sample, sources)`` called for each failure; None to raise it.
        tolerance: number of consecutive failures that end the iteration; 0 for no limit.
    """

    def __init__(self, name: str, handler: Callable[..., None] | None, tolerance: int = 100):
        self.name = name
        self.handler = handler
        self.tolerance = tolerance
        self._failures = 0

    def reset(self) -> None:
        """Reset the counter."""
        self._failures = 0

    @contextmanager
    def handle_errors(self, sample: Any) -> Iterator[None]:
        """Surround the processing of one sample.

        Raises:
            FatalSampleError: too many consecutive failures, or an error that is not caused by a sample.
        """
        try:
            yield
        except SkipSample:
            return
        except GeneratorExit:
            raise
        except SYSTEM_EXCEPTIONS as error:
            raise FatalSampleError.from_sample(sample, f"{self.name}: {error}") from error
        except Exception as error:
            self._failures += 1
            if self.handler is None:
                raise
            self.handler(error, sample, get_source_info(sample))
            if 0 < self.tolerance <= self._failures:
                what = f"{self.name} failed {self._failures} times in a row; the last time: {error}"
                raise FatalSampleError.from_sample(sample, what) from error
        else:
            self._failures = 0


def log_exception(e: Exception, sample: Any, sources: list[Any] | None = None) -> None:
    """Log each failure; see :func:`energon_lite.extras.energon.log_exception`."""
    error_handlers.log_exception(e, sample, sources)


def reraise_exception(e: Exception, sample: Any, sources: list[Any] | None = None) -> None:
    """End the run at the first failure."""
    raise e


def legacy_handler(handler: Callable[..., None]) -> Callable[..., None]:
    """Return a handler of ``(error, sample, sources)`` for one that may take ``(error, sample)`` only."""
    if len(inspect.signature(handler).parameters) != 2:
        return handler
    return lambda error, sample, sources=None: handler(error, sample)


@contextmanager
def handle_restore_errors(error_handler: Callable[..., None], sample: Any) -> Iterator[None]:
    """Surround the restoration of a sample: the handler decides about errors."""
    try:
        yield
    except (SkipSample, GeneratorExit, *SYSTEM_EXCEPTIONS):
        raise
    except Exception as error:
        error_handler(error, sample, get_source_info(sample))
