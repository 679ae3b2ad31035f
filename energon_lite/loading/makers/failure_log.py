"""Telling of failures as soon as they are known: the first one of each kind in full; further ones are only counted.

Counts are made when a batch is delivered. Whoever mends a hook does not want to wait for that, nor for a hundred
failures in a row. So the process in which a step fails tells of it at once; a worker process sends it to its trainer,
who knows what other workers have told of already.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from energon_lite.loading.makers.outcomes import Failure

__all__ = ["FailureLog"]

logger = logging.getLogger(__name__)

#: Different kinds that are told of; hooks may fail in ever new ways.
_MAX_KINDS = 1000


class FailureLog:
    """Tells of failures, each kind once. What was skipped or dropped is no failure.

    Args:
        say: how; None: as a warning of this module's logger.
    """

    def __init__(self, say: Callable[[Failure], None] | None = None):
        self._say = say or _warn
        self._told: dict[tuple[str, str, str], object] = {}

    def tell(self, failure: Failure) -> None:
        """Tell of a failure, if it is the first one of its kind."""
        if failure.skipped or len(self._told) >= _MAX_KINDS:
            return
        mine = object()
        if self._told.setdefault(failure.kind, mine) is mine:  # one step: workers may be threads
            self._say(failure)

    def sending(self, say: Callable[[Failure], None]) -> FailureLog:
        """One that has told of the same kinds, and tells of others in another way."""
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
