"""Tracebacks for writers of hooks: with the user's own frames, without those of this library.

``ENERGON_LITE_FULL_TRACEBACK=1`` in the environment keeps all frames.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeVar

from typing_extensions import ParamSpec

import energon_lite
from energon_lite.errors import EnergonLiteError

__all__ = [
    "chain_of",
    "hide_own_frames",
    "hook_traceback",
    "is_foreign",
    "place_in_hook",
    "short_traceback",
    "shows_more",
]

_LIBRARY = os.path.join(os.path.dirname(os.path.abspath(energon_lite.__file__)), "")
_FULL = "ENERGON_LITE_FULL_TRACEBACK"
#: Functions that call the user's code.
_GUARDS = frozenset({"guarded", "_apply"})


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
    last = error.__traceback__
    for link in _links(last.tb_next if last is not None else None):
        if not _is_own(link) and last is not None:
            last.tb_next = link
            last = link
    if last is not None:
        last.tb_next = None
    for cause in chain_of(error):
        if cause is not error and (isinstance(cause, EnergonLiteError) or _is_of_hook(cause)):
            rest: TracebackType | None = None
            for link in reversed([link for link in _links(cause.__traceback__) if not _is_own(link)]):
                link.tb_next = rest
                rest = link
            cause.__traceback__ = rest


def shows_more(error: BaseException) -> bool:
    """Return whether the traceback adds to the message: it has frames of the user's that the message does not show."""
    if isinstance(error, EnergonLiteError):
        return not getattr(error, "details", "") and any(is_foreign(cause.__traceback__) for cause in chain_of(error))
    return True


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
    if any(_is_own(link) and link.tb_frame.f_code.co_name == "raise_of_worker" for link in links):
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
