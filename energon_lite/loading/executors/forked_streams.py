"""Standard streams of a process that was forked while other threads were busy.

A fork copies the locks inside of file objects in their present state. If a thread of the parent is writing at that
moment, the lock of its stream stays locked in the child for ever, and the first line that the child logs blocks it.
(Python renews the locks of logging itself, but not those of the underlying streams.) The fix is a new file object on
the same descriptor. It also drops the parent's unflushed data, which the parent will write.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

__all__ = ["renew_streams"]

#: The parent's file objects. If they were collected, they would write unflushed data and close the descriptor.
_left_behind: list[Any] = []


def renew_streams() -> None:
    """Give this process's standard streams and log handlers file objects of their own."""
    renewed: dict[int, Any] = {}
    sys.stdout = _renewed(sys.stdout, renewed)
    sys.stderr = _renewed(sys.stderr, renewed)
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for handler in (handler for logger in loggers for handler in getattr(logger, "handlers", ())):
        if isinstance(handler, logging.StreamHandler) and "stream" in vars(handler):
            handler.stream = _renewed(handler.stream, renewed)


def _renewed(stream: Any, renewed: dict[int, Any]) -> Any:
    """Return a new file object for a stream's descriptor; the stream itself if it has none."""
    if id(stream) not in renewed:
        try:
            settings = {"encoding": stream.encoding, "errors": stream.errors}
            renewed[id(stream)] = open(stream.fileno(), "w", buffering=1, closefd=False, **settings)  # noqa: SIM115
            _left_behind.append(stream)
        except (AttributeError, OSError, ValueError):  # no stream, a closed one, or one in memory
            renewed[id(stream)] = stream
    return renewed[id(stream)]
