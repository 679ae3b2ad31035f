"""Immediate reports of failures: the first one of each kind in full; further ones are only counted.

Failures are counted when their batch is delivered. A user who debugs a hook should not have to wait for that, nor for a
hundred failures in a row. So the process in which a step fails reports it at once; a worker process sends the report to
the trainer process, which knows the kinds that other workers have reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from energon_lite.loading.makers.outcomes import Failure

__all__ = ["FailureLog"]

logger = logging.getLogger(__name__)

#: Largest number of kinds that are reported; the messages of a hook's failures may all differ.
_MAX_KINDS = 1000


class FailureLog:
    """Log that reports each kind of failure once. Skipped and dropped samples are not failures.

    Args:
        say: function that reports a failure; None: a warning of this module's logger.
    """

    def __init__(self, say: Callable[[Failure], None] | None = None):
        self._say = say or _warn
        self._told: dict[tuple[str, str, str], object] = {}

    def tell(self, failure: Failure) -> None:
        """Report a failure if it is the first one of its kind."""
        if failure.skipped or len(self._told) >= _MAX_KINDS:
            return
        mine = object()
        if self._told.setdefault(failure.kind, mine) is mine:  # atomic, because workers may be threads
            self._say(failure)

    def sending(self, say: Callable[[Failure], None]) -> FailureLog:
        """Return a log that has reported the same kinds, and reports others with ``say``."""
        log = FailureLog(say)
        log._told.update(self._told)
        return log

    def __getstate__(self) -> dict[str, Any]:
        return {"_say": _warn, "_told": self._told}


def _warn(failure: Failure) -> None:
    details = failure.details.rstrip()
    fix = f"\n  fix:   {failure.fix}" if failure.fix and failure.fix not in details else ""
    where = "" if failure.leaf == "*" else f" of {failure.leaf}"
    logger.warning(
        "%s failed for %s%s: %s (further failures of this kind are counted, and not shown)\n%s%s",
        failure.stage,
        failure.key,
        where,
        failure.reason,
        details,
        fix,
    )
