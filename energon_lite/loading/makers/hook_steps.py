"""Steps of jobs: one call of a hook, a decoder or a reader, with its errors as outcomes of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from energon_lite.errors import FatalSampleError, SkipSample
from energon_lite.hooks import TaskEncoder, is_overridden, own_hooks, running_context, seeded_hooks
from energon_lite.loading.makers.hook_errors import (
    FATAL,
    NEVER_A_RESULT,
    as_infrastructure_error,
    check_result,
    failure_of,
    hook_traceback,
    note_where,
    sources_of,
)
from energon_lite.loading.makers.leaf import Leaf, SampleNames
from energon_lite.loading.makers.observers import Services
from energon_lite.loading.makers.outcomes import Address, Failure, Rejected
from energon_lite.worker_config import ErrorHandler


class UnseededDraw(Exception):
    """A hook that ran without seeds drew from the global generators, and failed."""


class HookSteps:
    """Runner of single steps, which notifies the observers, and reports errors.

    Args:
        leaves: the leaves, in the order's numbering.
        encoder: the user's hooks.
        error_handler: see :class:`~energon_lite.WorkerConfig`.

    Attributes:
        services: objects of the loader: observers, the log of failures, the cache.
        seeded_hooks: names of the hooks that need the global generators seeded.
    """

    def __init__(self, leaves: Sequence[Leaf], encoder: TaskEncoder, error_handler: ErrorHandler | None):
        self.leaves = leaves
        self.encoder = encoder
        self.error_handler = error_handler
        self.services = Services()
        self.seeded_hooks = seeded_hooks(encoder)
        self._own = own_hooks(encoder)

    def tell(self, stage: str, leaf: str, key: str) -> None:
        """Notify the observers that a step is about to begin."""
        for observer in self.services.observers:
            observer.step(stage, leaf, key)

    def end(self, addresses: Sequence[Address | None]) -> dict[str, Any] | None:
        """Notify the observers that the batch of these samples is made; return the trace of the first that has one."""
        traces = [observer.end(addresses) for observer in self.services.observers]
        return next((trace for trace in traces if trace is not None), None)

    def guarded(
        self,
        stage: str,
        leaf: str,
        key: str | SampleNames | Sequence[Address],
        subject: Any,
        step: Callable[..., Any],
        *arguments: Any,
    ) -> Any:
        """Run one step.

        Args:
            stage, leaf, key: see :class:`~energon_lite.loading.makers.observers.Observer`. In place of the key, the
                addresses of samples, from which the key is made if it is needed.
            subject: argument for the user's error handler if the step fails.

        Raises:
            Rejected: the step raised an error that fails the sample.
            FatalSampleError: the step raised an error that ends the iteration, or returned a value that no hook may.
        """
        try:
            if self.services.observers:
                self.tell(stage, leaf, key if isinstance(key, str) else f"{self.names(key):short}")
            if stage in self.seeded_hooks and (context := running_context()) is not None and context.seeds:
                context.seed_globals()
            value = step(*arguments)
            if type(value) in NEVER_A_RESULT or isinstance(value, BaseException):
                self._check(value, stage, self._whose(key, leaf), arguments)
            return value
        except Exception as error:
            raise self._rejected(error, stage, leaf, key, subject)  # noqa: B904  # it has a cause, or none on purpose

    def _rejected(
        self, error: Exception, stage: str, leaf: str, key: str | SampleNames | Sequence[Address], subject: Any
    ) -> Rejected:
        """Return the outcome of a step that raised an error, and report it; see :meth:`guarded`.

        Raises:
            FatalSampleError: the error ends the iteration.
            UnseededDraw: the hooks have to run again with seeds, so the error counts for nothing.
        """
        context = running_context()
        if context is not None and not context.seeds:
            if context.lacks_seeds:
                raise UnseededDraw from None
            context.drew()  # what is reported is not made again, so hooks are seeded from here on
        if isinstance(error, SkipSample):
            rejected = Rejected(Failure(leaf, f"{self.names(key)}", stage, str(error) or "SkipSample", skipped=True))
            rejected.__cause__ = None  # nor is its context shown
            return rejected
        if isinstance(error, (StopIteration, StopAsyncIteration)):  # a generator would turn it into another error
            raise FatalSampleError(
                f"{stage} raised {type(error).__name__} for {self._whose(key, leaf)}",
                fix="an iterator was exhausted: give next() a default, or catch this; SkipSample leaves a sample out",
                details=hook_traceback(error),
            ) from None
        if isinstance(error, FATAL):
            note_where(error, stage, self._whose(key, leaf))
            raise error
        if (end := as_infrastructure_error(error, stage, leaf, f"{self.names(key)}")) is not None:
            raise end from (None if end.details else error)
        if self.error_handler is not None:
            sources = sources_of(subject)
            self.error_handler(error, subject, None if sources is None else list(sources))
        failure = failure_of(error, stage, leaf, f"{self.names(key)}")
        if self.services.failures is not None:
            self.services.failures.tell(failure)
        rejected = Rejected(failure)
        rejected.__cause__ = error
        return rejected

    def names(self, key: str | SampleNames | Sequence[Address]) -> SampleNames | str:
        """Return the name of samples in messages."""
        if isinstance(key, (str, SampleNames)):
            return key
        return SampleNames(f"{len(key)} samples", key, self.leaves)

    def _whose(self, key: str | SampleNames | Sequence[Address], leaf: str) -> str:
        return f"{self.names(key)}" if leaf == "*" else f"{self.names(key)} of {leaf}"

    def _check(self, value: Any, stage: str, whose: str, arguments: Sequence[Any]) -> None:
        """Refuse a value that no hook may return."""
        if stage not in self._own:
            return
        is_cooker = stage == "cook_crude_sample" and not is_overridden(self.encoder, stage)
        function = arguments[1].cook if is_cooker else getattr(self.encoder, stage)
        check_result(value, stage, function, whose)
