"""Handlers of failed samples, for ``WorkerConfig(global_error_handler=...)``, by Energon's names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

__all__ = ["log_exception", "reraise_exception"]

_log = logging.getLogger(__name__)


def log_exception(error: Exception, sample: Any, sources: Sequence[Any] | None = None) -> None:
    """Log each failure with its traceback and its sources; without a handler, only the first of a kind is logged.

    Args:
        error: the exception.
        sample: the argument of the hook.
        sources: the sample's :class:`~energon_lite.SourceInfo`, if they are known.

    Example:
        >>> config = WorkerConfig(rank=0, world_size=1, global_error_handler=log_exception)
    """
    places = [
        f"{source.dataset_path}[{source.index}] {source.shard_name} {list(source.file_names)}"
        for source in sources or ()
    ]
    _log.error("a %s failed: %s", type(sample).__name__, "; ".join(places) or "unknown source", exc_info=error)


def reraise_exception(error: Exception, sample: Any, sources: Sequence[Any] | None = None) -> None:
    """End the run at the first failure.

    Example:
        >>> config = WorkerConfig(rank=0, world_size=1, global_error_handler=reraise_exception)
    """
    raise error
