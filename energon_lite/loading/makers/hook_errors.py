"""Errors of hooks: failures of a sample, or errors that end the run; and tracebacks for writers of hooks.

A traceback has the user's own frames, without those of this library. ``ENERGON_LITE_FULL_TRACEBACK=1`` in the
environment keeps all frames.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from typing_extensions import ParamSpec

import energon_lite
from energon_lite.errors import EnergonLiteError, FatalSampleError
from energon_lite.hooks import place_of
from energon_lite.loading.makers.outcomes import Failure, where_of
from energon_lite.samples import CrudeSample, SourceInfo

#: Errors that are never caused by a sample: they end the iteration at once.
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

#: Error numbers of the operating system for a lack of memory or file descriptors.
_SHORTAGES = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE})
#: Phrases in torch's errors for a lack of CPU memory, for which torch has no exception type.
_NO_MEMORY = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory")
#: Phrases in torch's errors for a process that has no GPU, or cannot use it because it was forked.
_NO_DEVICE = ("in forked subprocess", "not compiled with CUDA", "No CUDA GPUs are available", "Found no NVIDIA driver")

#: Types that hooks return by mistake, with the fix for each.
_MISTAKES: dict[type, str] = {
    types.GeneratorType: "write it with `yield`, so that the loader knows that it gives any number of results",
    types.CoroutineType: "write it with `def`, without `async`; or have it run what is asynchronous: asyncio.run(...)",
    types.AsyncGeneratorType: "write it with `def`, without `async`",
    type: "return an instance of the class: did you forget to call it?",
    types.FunctionType: "return what the function returns: did you forget to call it?",
    types.MethodType: "return what the method returns: did you forget to call it?",
    types.BuiltinFunctionType: "return what the function returns: did you forget to call it?",
    **dict.fromkeys((map, filter, zip), "make a list of it; or write the hook with `yield`"),
    type(NotImplemented): "raise NotImplementedError, or leave the hook out",
}
#: Types that no hook may return.
NEVER_A_RESULT = frozenset({type(None), *_MISTAKES})


def failure_of(error: Exception, stage: str, leaf: str, key: str) -> Failure:
    """Return the outcome of a sample for which a step raised an error."""
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
        fix=(getattr(error, "fix", None) or "") if known else _cure_of(error),
        in_hook=is_foreign(error.__traceback__),
        place=place_in_hook(error.__traceback__),
    )


def as_infrastructure_error(error: BaseException, stage: str, leaf: str, key: str) -> FatalSampleError | None:
    """Return the error that ends the iteration if no sample caused it: the machine is out of memory or file
    descriptors, there is no GPU, or the user quit the debugger. None: the sample caused it.

    The set of failed samples must not depend on the resources that a machine has at the moment.
    """
    for cause in chain_of(error):
        if _is_shortage(cause):
            files = isinstance(cause, OSError) and cause.errno != errno.ENOMEM
            return FatalSampleError(
                f"{'no file descriptor' if files else 'no memory'} was left in {stage}: "
                f"{str(cause) or type(cause).__name__}",
                where=where_of(leaf, key),
                fix="raise the limit of open files (ulimit -n), or use fewer workers"
                if files
                else "if the sample is too large, raise SkipSample for it; else use fewer workers or smaller batches",
                details=hook_traceback(error) if is_foreign(error.__traceback__) else "",
            )
        if isinstance(cause, (RuntimeError, AssertionError)) and any(words in str(cause) for words in _NO_DEVICE):
            return FatalSampleError(
                f"{stage} asked for a GPU, and cannot have it: {str(cause).splitlines()[0]}",
                where=where_of(leaf, key),
                fix="let hooks work on the CPU, and have batches copied to the device ahead: "
                'get_savable_loader(dataset).to("cuda")',
                details=hook_traceback(error),
            )
    debugger = sys.modules.get("bdb")
    if debugger is not None and isinstance(error, debugger.BdbQuit):
        return FatalSampleError(
            f"the debugger was left in {stage}",
            where=where_of(leaf, key),
            fix="a worker process has no terminal: debug in the trainer's, with "
            'get_savable_loader(dataset, worker_type="main")',
        )
    return None


def note_where(error: BaseException, stage: str, whose: str) -> None:
    """Add the stage and the sample to an error that no sample caused. (``add_note`` needs Python 3.11.)"""
    if not isinstance(error, EnergonLiteError):
        error.__notes__ = [*getattr(error, "__notes__", ()), f"  in {stage}, for {whose}"]


def check_result(value: Any, stage: str, function: Callable[..., Any], whose: str, *, verb: str = "returned") -> None:
    """Refuse a value that no hook may return.

    Raises:
        FatalSampleError: names the hook, the value and the fix.
    """
    if value is None:
        raise returned_nothing(stage, function, verb=verb, whose=whose)
    fix = _MISTAKES.get(type(value))
    if isinstance(value, BaseException):
        fix = f"did you mean `raise {type(value).__name__}(...)`?"
    if fix is None:
        return
    what = f"{getattr(function, '__name__', stage)} {verb} a {type(value).__name__}"
    if type(value) is not types.GeneratorType:
        what += f", for {whose}"
    elif verb == "yielded":
        fix = "write `yield from` in place of `yield`"
    else:
        what += ", but is not a generator function"
    if type(value) in (types.CoroutineType, types.GeneratorType):
        value.close()  # else Python warns that it was never awaited
    raise FatalSampleError(what, where=place_of(function), fix=fix)


def returned_nothing(
    stage: str, function: Callable[..., Any], *, verb: str = "returned", whose: str = ""
) -> FatalSampleError:
    """Return the error for a hook that returned None.

    Args:
        whose: the sample and its data set, for the message.
    """
    name = getattr(function, "__name__", stage)
    return FatalSampleError(
        f"{name} {verb} None" + ("" if name == stage else f", in {stage}") + (f", for {whose}" if whose else ""),
        where=place_of(function),
        fix=f"did you forget `{'return' if verb == 'returned' else 'yield'} ...` in a branch of the hook? To "
        "leave a sample out, raise SkipSample",
    )


def returned_beside_yield(stage: str, function: Callable[..., Any], value: Any) -> FatalSampleError:
    """Return the error for a generator function that also returned a value, which would be lost."""
    return FatalSampleError(
        f"{getattr(function, '__name__', stage)} returned a {type(value).__name__}, but is a generator function, since "
        "it has a `yield`: what it returns is lost",
        where=place_of(function),
        fix="write `yield value` and then `return`, instead of `return value`",
    )


def _cure_of(error: BaseException) -> str:
    """Return the fix for some frequent errors of Python, or an empty string."""
    if isinstance(error, TypeError) and "'__restore_key__'" in str(error) and "missing" in str(error):
        return (
            "make it of the sample that it comes from: MySample.derive_from(sample, ...), or in a cooker "
            "MySample(**basic_sample_keys(sample), ...)"
        )
    return ""


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _SHORTAGES
    return isinstance(error, MemoryError) or (
        type(error) is RuntimeError and any(words in str(error) for words in _NO_MEMORY)
    )


def sources_of(subject: Any) -> tuple[SourceInfo, ...] | None:
    """Return the sources of a sample, or of a list of samples, for the user's error handler; None: it has none."""
    if isinstance(subject, SourceInfo):
        return (subject,)
    if isinstance(subject, CrudeSample):
        return subject.get("__sources__")
    if isinstance(subject, list):
        return tuple(source for sample in subject for source in sources_of(sample) or ()) or None
    return getattr(subject, "__sources__", None)


_LIBRARY = os.path.join(os.path.dirname(os.path.abspath(energon_lite.__file__)), "")
_FULL = "ENERGON_LITE_FULL_TRACEBACK"
#: Functions that call the user's code.
_GUARDS = frozenset({"guarded", "made", "_apply"})


Given = ParamSpec("Given")
Returned = TypeVar("Returned")


def short_traceback(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Decorate a function of the API so that errors with a complete message leave it without this library's frames."""

    @functools.wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        try:
            return function(*args, **kwargs)
        except EnergonLiteError as error:
            hide_own_frames(error)
            raise

    return called


def hook_traceback(error: BaseException) -> str:
    """Return the traceback without this library's frames, unless there are no others."""
    made = traceback.TracebackException.from_exception(error)
    if os.environ.get(_FULL):
        return "".join(made.format())
    report: traceback.TracebackException | None = made
    while report is not None:
        own = [frame for frame in report.stack if not frame.filename.startswith(_LIBRARY)]
        if own:
            report.stack = traceback.StackSummary.from_list(own)
        report = report.__cause__ or report.__context__
    return "".join(made.format())


def hide_own_frames(error: BaseException) -> None:
    """Remove this library's frames from the traceback of an error that leaves it: an error of a hook, or one with a
    complete message. Other errors, which may be defects of this library, keep all frames. The outermost frame of this
    library stays, too.
    """
    if os.environ.get(_FULL) or not (isinstance(error, EnergonLiteError) or _is_of_hook(error)):
        return
    if (outermost := error.__traceback__) is not None:
        outermost.tb_next = _without_own(outermost.tb_next)
    for cause in chain_of(error):
        if cause is not error and (isinstance(cause, EnergonLiteError) or _is_of_hook(cause)):
            cause.__traceback__ = _without_own(cause.__traceback__)


def _without_own(trace: TracebackType | None) -> TracebackType | None:
    """Remove this library's frames from a traceback, and return its first link."""
    rest: TracebackType | None = None
    for link in reversed([link for link in _links(trace) if not _is_own(link)]):
        link.tb_next = rest
        rest = link
    return rest


def shows_more(error: BaseException) -> bool:
    """Return whether the traceback adds to the message: it has frames of the user's that the message does not show."""
    if isinstance(error, EnergonLiteError):
        return not getattr(error, "details", "") and any(is_foreign(cause.__traceback__) for cause in chain_of(error))
    return True


def raise_of_worker(error: BaseException) -> NoReturn:
    """Raise an error that a worker sent, with its traceback in the worker.

    Raises:
        BaseException: always.
    """
    if sys.version_info < (3, 11) and (notes := getattr(error, "__notes__", None)):  # Python 3.10 shows no notes
        raise error from RuntimeError("\n" + "\n".join(notes))
    raise error


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and the chain of errors that caused it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def is_foreign(trace: TracebackType | None) -> bool:
    """Return whether a traceback has frames that are not this library's."""
    return not all(map(_is_own, _links(trace)))


def place_in_hook(trace: TracebackType | None) -> str:
    """Return file and line of the last frame outside this library; "" if there is none."""
    foreign = [link for link in _links(trace) if not _is_own(link)]
    return f"{foreign[-1].tb_frame.f_code.co_filename}:{foreign[-1].tb_lineno}" if foreign else ""


def _is_of_hook(error: BaseException) -> bool:
    """Return whether the error comes from code that a guard called, here or in a worker."""
    links = list(_links(error.__traceback__))
    if any(_is_own(link) and link.tb_frame.f_code.co_name == raise_of_worker.__name__ for link in links):
        return True
    guards = [place for place, link in enumerate(links) if _is_own(link) and link.tb_frame.f_code.co_name in _GUARDS]
    return bool(guards) and not all(map(_is_own, links[guards[-1] :]))


def _is_own(one: TracebackType) -> bool:
    return one.tb_frame.f_code.co_filename.startswith(_LIBRARY)


def _links(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        following = trace.tb_next
        yield trace
        trace = following
