"""Streams of a process that was forked beside busy threads.

A fork copies the locks inside of file objects as they are at that moment. If a thread of the parent was just writing,
the lock of that stream stays closed in the child for ever, and the first line that the child logs hangs it. (Python
renews the locks of logging itself, but not those of the streams below it.) The cure is a new file object on the same
descriptor. It also leaves behind what the parent had not flushed, which is the parent's to write.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

__all__ = ["renew_streams"]

#: The parent's objects: collected, one would write what it has not flushed, and close the descriptor.
_left_behind: list[Any] = []


def renew_streams() -> None:
    """Give this process's standard streams and log handlers file objects of their own."""
    renewed: dict[int, Any] = {}
    sys.stdout, sys.stderr = _renewed(sys.stdout, renewed), _renewed(sys.stderr, renewed)
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for handler in (handler for logger in loggers for handler in getattr(logger, "handlers", ())):
        if isinstance(handler, logging.StreamHandler) and "stream" in vars(handler):
            handler.stream = _renewed(handler.stream, renewed)


def _renewed(stream: Any, renewed: dict[int, Any]) -> Any:
    """A new object for the file of a stream; the stream itself, if it has none."""
    if id(stream) not in renewed:
        try:
            settings = {"encoding": stream.encoding, "errors": stream.errors}
            renewed[id(stream)] = open(stream.fileno(), "w", buffering=1, closefd=False, **settings)  # noqa: SIM115
            _left_behind.append(stream)
        except (AttributeError, OSError, ValueError):  # none, closed, or only in memory
            renewed[id(stream)] = stream
    return renewed[id(stream)]
