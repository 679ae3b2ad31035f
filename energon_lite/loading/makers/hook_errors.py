"""What a step of the pipeline raises, or wrongly returns: what is the sample's fault, and what the user is shown."""

from __future__ import annotations

import errno
import inspect
import os
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import energon_lite
from energon_lite.errors import EnergonLiteError, FatalSampleError
from energon_lite.loading.makers.outcomes import Failure

__all__ = [
    "FATAL",
    "failure_of",
    "hook_traceback",
    "is_out_of_resources",
    "out_of_resources",
    "returned_nothing",
    "shows_more",
    "undeclared_generator",
]

#: Never a sample's fault: these end the iteration at once.
FATAL = (
    FatalSampleError,
    ImportError,
    NameError,
    RecursionError,
    StopAsyncIteration,
    StopIteration,
    SyntaxError,
    SystemError,
)

#: What a machine may be short of.
_SHORTAGES = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE})
#: How torch, which has no exception of its own for the CPU, says that there is no memory.
_NO_MEMORY = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory")
_LIBRARY = os.path.join(os.path.dirname(os.path.abspath(energon_lite.__file__)), "")


def failure_of(error: Exception, stage: str, leaf: str, key: str) -> Failure:
    """The outcome of a sample for which a step raised an error."""
    known = isinstance(error, EnergonLiteError)
    reason = error.what if isinstance(error, EnergonLiteError) else str(error)
    kind = type(error).__name__
    return Failure(
        leaf,
        key,
        stage,
        f"{kind}: {reason}" if reason else kind,
        skipped=False,
        details=hook_traceback(error),
        fix=(getattr(error, "fix", None) or "") if known else "",
        in_hook=_is_foreign(error.__traceback__),
    )


def hook_traceback(error: BaseException) -> str:
    """The traceback without this library's frames, wherever any others are left."""
    made = traceback.TracebackException.from_exception(error)
    one: traceback.TracebackException | None = made
    while one is not None:
        own = [frame for frame in one.stack if not frame.filename.startswith(_LIBRARY)]
        if own:
            one.stack = traceback.StackSummary.from_list(own)
        one = one.__cause__ or one.__context__
    return "".join(made.format())


def shows_more(error: BaseException) -> bool:
    """Whether the traceback says more than the message: it has frames of the user's that are not in there."""
    if isinstance(error, EnergonLiteError):
        return not getattr(error, "details", "") and any(_is_foreign(one.__traceback__) for one in _chain(error))
    return True


def is_out_of_resources(error: BaseException) -> bool:
    """Whether memory or file descriptors were short, also where another error was made of that one."""
    return any(_is_shortage(one) for one in _chain(error))


def out_of_resources(error: Exception, stage: str, leaf: str, key: str) -> FatalSampleError:
    """Not skipped: which samples are left out must not depend on what a machine is short of just then."""
    cause = next(one for one in _chain(error) if _is_shortage(one))
    files = isinstance(cause, OSError) and cause.errno != errno.ENOMEM
    return FatalSampleError(
        f"{'no file descriptor' if files else 'no memory'} was left in {stage}: {str(cause) or type(cause).__name__}",
        where=f"data set {leaf}, {key}",
        fix="raise the limit of open files (ulimit -n), or use fewer workers"
        if files
        else "if the sample is too large, raise SkipSample for it; else use fewer workers or smaller batches",
    )


def undeclared_generator(stage: str) -> FatalSampleError:
    """A hook that is no generator function returned a generator."""
    return FatalSampleError(
        f"{stage} returned a generator, but is no generator function",
        where=None,
        fix="write it with `yield`, so that the loader knows that it gives any number of results",
    )


def returned_nothing(stage: str, function: Callable[..., Any], *, verb: str = "returned") -> FatalSampleError:
    """A hook's result is None."""
    name = getattr(function, "__name__", stage)
    return FatalSampleError(
        f"{name} {verb} None" + ("" if name == stage else f", in {stage}"),
        where=_place_of(function),
        fix=f"did you forget `{'return' if verb == 'returned' else 'yield'} ...`? (SkipSample leaves a sample out)",
    )


def _place_of(function: Callable[..., Any]) -> str | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _SHORTAGES
    return isinstance(error, MemoryError) or (
        type(error) is RuntimeError and any(words in str(error) for words in _NO_MEMORY)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was made of."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_foreign(trace: TracebackType | None) -> bool:
    return any(not one.filename.startswith(_LIBRARY) for one in traceback.extract_tb(trace))
