"""Immediate reports of failures and fallbacks: the first one of each kind in full; further ones are only counted.

Failures are counted when their batch is delivered. A user who debugs a hook should not have to wait for that, nor for a
hundred failures in a row. So the process in which a step fails reports it at once; a worker process sends the report to
the trainer process, which knows the kinds that other workers have reported.

An error on the fast route costs no sample: the reporting route repeats the work, and reports the failure if there is
one. But a fast route that always fails makes a run slow, so these fallbacks are counted, too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from energon_lite.loading.makers.outcomes import Failure

__all__ = ["FailureLog", "Fallbacks"]

logger = logging.getLogger(__name__)

#: Largest number of kinds that are reported; the messages of a hook's failures may all differ.
_MAX_KINDS = 1000
#: Data sets that are named for a fallback, at most.
_MAX_NAMES = 3

#: Number of fallbacks by reason, and a text on the first of them: its data sets and the error.
Fallbacks = Mapping[str, tuple[int, str]]


class FailureLog:
    """Log that reports each kind of failure once. Skipped and dropped samples are not failures.

    Args:
        say: function that reports a failure; None: a warning of this module's logger.
    """

    def __init__(self, say: Callable[[Failure], None] | None = None):
        self._say = say or _warn
        self._told: dict[tuple[str, str, str], object] = {}
        self._fallbacks: dict[str, tuple[int, str]] = {}
        self._sends = False
        self._counting = threading.Lock()  # workers may be threads

    def tell(self, failure: Failure) -> None:
        """Report a failure if it is the first one of its kind."""
        if failure.skipped or len(self._told) >= _MAX_KINDS:
            return
        mine = object()
        if self._told.setdefault(failure.kind, mine) is mine:  # atomic, because workers may be threads
            self._say(failure)

    def fell_back(self, route: str, leaves: Iterable[str], error: Exception) -> None:
        """Count an error on the fast route, whose work the reporting route repeats; log the first for each reason.

        Args:
            route: ``read_together``, ``decode_together``, ``collate`` (of a batch field by field), or ``decode`` (of
                one sample).
            leaves: names of the data sets of the samples.
            error: the error.
        """
        names = [*dict.fromkeys(leaves)]
        text = f"{', '.join([*names[:_MAX_NAMES], *(['...'] if names[_MAX_NAMES:] else [])])}: {error}"
        self.add_fallbacks({f"{route}: {type(error).__name__}": (1, text)})

    def add_fallbacks(self, fallbacks: Fallbacks) -> None:
        """Count fallbacks; those of a worker process were counted there first."""
        for reason, (count, first) in fallbacks.items():
            with self._counting:
                before, text = self._fallbacks.get(reason, (0, first))
                self._fallbacks[reason] = before + count, text
            if not before and not self._sends:
                logger.warning(
                    "the fast route failed (%s) for data set %s\n  Its samples are made one by one, which is slower. "
                    "Further fallbacks are counted in loader.stats(), and not shown.",
                    *(reason, text),
                )

    def fallbacks(self) -> dict[str, int]:
        """Return the number of fallbacks by route and type of error."""
        return {reason: count for reason, (count, _) in self._fallbacks.items()}

    def take_fallbacks(self) -> Fallbacks:
        """Return the fallbacks since the last call, to be sent to another process; empty on the fast route."""
        taken = self._fallbacks
        if taken:
            self._fallbacks = {}
        return taken

    def sending(self, say: Callable[[Failure], None]) -> FailureLog:
        """Return a log that has reported the same kinds, reports others with ``say``, and logs no fallbacks."""
        log = FailureLog(say)
        log._told.update(self._told)
        log._sends = True
        return log

    def __reduce__(self) -> tuple[Any, ...]:
        return FailureLog, (), {"_told": self._told}


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
