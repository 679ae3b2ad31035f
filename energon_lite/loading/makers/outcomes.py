"""Outcomes of samples: delivered, skipped or failed; the error for too many failures in a row; and immediate reports.

Failures are counted when their batch is delivered. A user who debugs a hook should not have to wait for that, nor for a
hundred failures in a row. So the process in which a step fails reports it at once; a worker process sends the report to
the trainer process, which knows the kinds that other workers have reported.

An error on the fast route costs no sample: the reporting route repeats the work, and reports the failure if there is
one. But a fast route that always fails makes a run slow, so these fallbacks are counted, too.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from enum import Enum
from typing import Any

from energon_lite.batching.digests import NO_SAMPLES
from energon_lite.errors import FatalSampleError
from energon_lite.hooks import HOOK_ORDER

logger = logging.getLogger(__name__)

#: Index in ``HOOK_ORDER`` of the first hook for several samples; results of the hooks before it are not delivered yet.
_SELECTION = HOOK_ORDER.index("select_samples_to_pack")

#: Numbers of failures in a row that are reported if there is no limit.
_TOLD = frozenset({100, 1_000, 10_000, 100_000})

#: Largest number of reasons that are counted separately; hooks may put anything into their messages.
_MAX_REASONS = 1000
#: Characters that may surround a key in a reason.
_MARKS = "'\"`()[]:,;."

#: ``(leaf, index, epoch)``; further numbers may identify a part of the sample.
Address = tuple[int, ...]


@dataclass(frozen=True)
class Failure:
    """A sample that was skipped or that failed, with the reason.

    Args:
        details: the traceback of the error.
        in_hook: the traceback ends in code outside this library.
        dropped: the sample is valid, but got into no batch.
        address: ``(leaf, index, epoch)`` of the sample; None: not known.
        shared: it was lost in the same call of a hook as the sample before it.
        place: file and line in the user's code that raised the error; "": it was not raised there.
    """

    leaf: str
    key: str
    stage: str
    reason: str
    skipped: bool
    details: str = ""
    fix: str = ""
    in_hook: bool = False
    dropped: bool = False
    address: Address | None = None
    shared: bool = False
    place: str = ""

    @property
    def kind(self) -> tuple[str, str, str]:
        """Stage, error type and place: of the failures with the same kind, one is reported and the others counted."""
        return self.stage, self.reason.split(":", 1)[0], self.place or self.leaf

    def at(self, address: Sequence[int] | None, *, shared: bool = False) -> Failure:
        """Return the same failure for the sample at an address."""
        own = self.address if address is None else tuple(address[:3])
        return self if (own, shared) == (self.address, self.shared) else replace(self, address=own, shared=shared)


def of_each(failure: Failure, addresses: Sequence[Address | None]) -> Iterator[Failure]:
    """Yield the outcomes of samples that were lost in one call of a hook."""
    return (failure.at(address, shared=place > 0) for place, address in enumerate(addresses))


class Reasons(Counter[tuple[Any, ...]]):
    """Counts of reasons. Reasons that differ only in numbers or in the key of the sample are counted as one, under the
    first of them.

    Example:
        >>> reasons = Reasons()
        >>> for key in ("a1", "a2"):
        ...     reasons.add(key, "decode", f"{key} is broken", False)
        >>> dict(reasons), reasons.text("decode", "a1 is broken", False)
        ({('decode', 'a1 is broken', False): 2}, 'a1 is broken (one of them)')
    """

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._several: set[tuple[Any, ...]] = set()

    def add(self, key: str, *parts: Any) -> None:
        """Count a sample.

        Args:
            key: its name.
            parts: the parts of the reason; the last two are its text, and whether the sample was skipped.
        """
        *before, reason, skipped = parts
        words = ("#" if any(map(str.isdigit, word)) or word.strip(_MARKS) == key else word for word in reason.split())
        kind = (*before, " ".join(words), skipped)
        if kind not in self._first and len(self._first) >= _MAX_REASONS:
            kind = parts = (*before, "(other reasons)", skipped)
        first = self._first.setdefault(kind, parts)
        self[first] += 1
        if first != parts:
            self._several.add(first)

    def text(self, *parts: Any) -> str:
        """Return the text of a counted reason, with a remark if it stands for several that differ as above."""
        return f"{parts[-2]} (one of them)" if parts in self._several else f"{parts[-2]}"


class Mark(Enum):
    """An outcome between failures that is neither a failure nor a delivered sample."""

    FINE = "a sample that went well so far; it is counted when it is delivered"
    TRUNCATED = "a sample of which only the first tokens are delivered"
    SPLIT = "a sample that is delivered in several pieces"


@dataclass
class Result:
    """A finished job.

    Args:
        batch: the result of the hooks.
        outcomes: the outcomes of its samples, in their order.
        tokens: tokens that were planned for it, if they were planned.
        trace: timing record, if requested; see :mod:`energon_lite.loading.makers.observers`.
        digest: digest of the samples in it; see :mod:`energon_lite.batching.digests`.
    """

    batch: Any
    outcomes: list[Outcome] = field(default_factory=list)
    tokens: int = 0
    trace: dict[str, Any] | None = None
    digest: int = NO_SAMPLES


#: Outcome of a sample. If it is part of the batch: the number of its leaf, or None if that is not known.
Outcome = Failure | Mark | int | None


class Rejected(Exception):
    """Exception for a sample (or batch) that will not be part of the result."""

    def __init__(self, failure: Failure):
        self.failure = failure


class FailureStreak:
    """Counter of failures in a row: of samples, and of the hooks that have a tolerance of their own.

    Args:
        tolerance: number of samples in a row, skipped or failed, that ends the run; 0: no limit.
        hooks: number of failed calls in a row, by hook, that ends the run; 0: no limit. They do not count for
            ``tolerance``.
    """

    def __init__(self, tolerance: int, hooks: Mapping[str, int]):
        self._tolerance = tolerance
        self._limits = hooks
        self._early = self._late = 0  # samples lost in hooks of single samples, and in later hooks
        self._calls = dict.fromkeys(hooks, 0)

    def reset(self, mark: Mark | None = None) -> None:
        """Note that a sample was delivered, or, with ``Mark.FINE``, that it passed the hooks of single samples."""
        self._early = 0
        if mark is None:
            self._late = 0
        if self._calls:
            self._forget(len(HOOK_ORDER) if mark is None else _SELECTION)

    def add(self, failure: Failure) -> FatalSampleError | None:
        """Count a failure; return the error that ends the iteration if there are too many in a row."""
        stage = failure.stage
        place = HOOK_ORDER.index(stage) if stage in HOOK_ORDER else 0
        self._forget(place)
        if stage not in self._limits or failure.skipped:
            self._early += place < _SELECTION
            self._late += place >= _SELECTION
            count = self._early + self._late
            limit = self._tolerance
        else:
            self._calls[stage] += not failure.shared
            count = self._calls[stage]
            limit = self._limits[stage]
        if not limit and count in _TOLD:
            logger.warning("without end, since there is no limit: %s", too_many_failures(count, failure, self._limits))
        return too_many_failures(count, failure, self._limits) if 0 < limit <= count else None

    def _forget(self, before: int) -> None:
        """Reset the counts of the hooks before an index in ``HOOK_ORDER``."""
        for hook in self._calls:
            if HOOK_ORDER.index(hook) < before:
                self._calls[hook] = 0


def where_of(leaf: str, key: str) -> str:
    """Return the data set and the key of a sample as text; with the leaf "*", the key names several samples."""
    return key if leaf == "*" else f"data set {leaf}, {key}"


def too_many_failures(
    count: int, failure: Failure, hooks: Mapping[str, int] | None = None, *, are_all: bool = False
) -> FatalSampleError:
    """Return the error for too many failures in a row.

    Args:
        count: failures in a row.
        failure: the last failure.
        hooks: tolerances of single hooks.
        are_all: there are no other samples, so a higher tolerance would not help.
    """
    if failure.stage in (hooks or {}) and not failure.skipped:
        what = f"{failure.stage} failed {count} times in a row; the last time: {failure.reason}"
        more = "failure_tolerance of its @stateless(...)"
    else:
        what = f"{count} samples in a row were skipped or failed; the last one, in {failure.stage}: {failure.reason}"
        more = "failure_tolerance of the task encoder"
    fix = failure.fix or "mend the hook or the data"
    return FatalSampleError(
        f"{what}; there are no others" if are_all else what,
        where=where_of(failure.leaf, failure.key),
        fix=fix if are_all else f"{fix}; to allow more in a row, raise {more} (0: any number)",
        details=failure.details if failure.in_hook else "",
    )


def set_restore_key(value: Any, key: tuple[Any, ...]) -> None:
    """Store the restore key of a sample or a batch in it, if it has a place for it."""
    if isinstance(value, dict):
        if "__restore_key__" in value:
            value["__restore_key__"] = key
    elif is_dataclass(value) and hasattr(value, "__restore_key__"):
        object.__setattr__(value, "__restore_key__", key)


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
            route: ``read_together``, ``collate`` (of a batch field by field), or ``decode`` (of
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
