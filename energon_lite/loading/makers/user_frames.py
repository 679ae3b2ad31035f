"""Tracebacks as the writer of a hook wants them: their own frames, without those of this library.

``ENERGON_LITE_FULL_TRACEBACK=1`` in the environment leaves all frames where they are.
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
#: The functions that call what is the user's.
_GUARDS = frozenset({"guarded", "_apply"})


Given = ParamSpec("Given")
Returned = TypeVar("Returned")


def short_traceback(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """A function that users call: errors whose messages say all leave it with their callers' frames alone."""

    @functools.wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        try:
            return function(*args, **kwargs)
        except EnergonLiteError as error:
            hide_own_frames(error)
            raise

    return called


def hook_traceback(error: BaseException) -> str:
    """The traceback without this library's frames, wherever any others are left."""
    made = traceback.TracebackException.from_exception(error)
    if os.environ.get(_FULL):
        return "".join(made.format())
    one: traceback.TracebackException | None = made
    while one is not None:
        own = [frame for frame in one.stack if not frame.filename.startswith(_LIBRARY)]
        if own:
            one.stack = traceback.StackSummary.from_list(own)
        one = one.__cause__ or one.__context__
    return "".join(made.format())


def hide_own_frames(error: BaseException) -> None:
    """Take this library's frames out of the traceback of an error that is about to leave it: one of a hook, or one
    whose message says all. Of any other, which may be a defect of this library, all frames stay. The frame that
    lets it out stays, too.
    """
    if os.environ.get(_FULL) or not (isinstance(error, EnergonLiteError) or _is_of_hook(error)):
        return
    last = error.__traceback__
    for one in _links(last.tb_next if last is not None else None):
        if not _is_own(one) and last is not None:
            last.tb_next = one
            last = one
    if last is not None:
        last.tb_next = None
    for cause in chain_of(error):
        if cause is not error and (isinstance(cause, EnergonLiteError) or _is_of_hook(cause)):
            rest: TracebackType | None = None
            for one in reversed([one for one in _links(cause.__traceback__) if not _is_own(one)]):
                one.tb_next = rest
                rest = one
            cause.__traceback__ = rest


def shows_more(error: BaseException) -> bool:
    """Whether the traceback says more than the message: it has frames of the user's that are not in there."""
    if isinstance(error, EnergonLiteError):
        return not getattr(error, "details", "") and any(is_foreign(one.__traceback__) for one in chain_of(error))
    return True


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was made of."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def is_foreign(trace: TracebackType | None) -> bool:
    """Whether a traceback has frames that are not this library's."""
    return not all(map(_is_own, _links(trace)))


def place_in_hook(trace: TracebackType | None) -> str:
    """File and line of the last frame that is not this library's; "" if there is none."""
    found = [one for one in _links(trace) if not _is_own(one)]
    return f"{found[-1].tb_frame.f_code.co_filename}:{found[-1].tb_lineno}" if found else ""


def _is_of_hook(error: BaseException) -> bool:
    """Whether the error comes out of what a guard called, here or in a worker."""
    links = list(_links(error.__traceback__))
    if any(_is_own(one) and one.tb_frame.f_code.co_name == "raise_of_worker" for one in links):
        return True
    guards = [place for place, one in enumerate(links) if _is_own(one) and one.tb_frame.f_code.co_name in _GUARDS]
    return bool(guards) and not all(map(_is_own, links[guards[-1] :]))


def _is_own(one: TracebackType) -> bool:
    return one.tb_frame.f_code.co_filename.startswith(_LIBRARY)


def _links(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        following = trace.tb_next
        yield trace
        trace = following
