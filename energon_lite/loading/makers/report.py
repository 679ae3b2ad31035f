"""Report on the outcomes of samples: counted when the batch is delivered, logged once, summed up at the end."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.outcomes import Failure, FailureLog, FailureStreak, Mark, Outcome, Reasons

logger = logging.getLogger(__name__)

#: Number of samples from which on a high share of skips is reported as filtering.
_FILTER_SAMPLES = 1000
#: Share of lost samples above which skipping is reported as filtering.
_FILTER_SHARE = 0.1
#: Types of outcomes that are not delivered, or are counted elsewhere.
_KINDS = frozenset({Failure, Mark})


class Report:
    """Counts of delivered, skipped and failed samples.

    Args:
        tolerance: number of failures in a row that raises an error; 0: never.
        leaves: the leaves, in the order's numbering.
        hooks: tolerances of single hooks.
        on_lost: called with the samples that were skipped or failed, whenever some are counted.

    Attributes:
        log: log of the first failure of each kind; failures that are known before they are counted are reported there.
    """

    def __init__(
        self,
        tolerance: int,
        leaves: Sequence[Leaf] = (),
        *,
        hooks: Mapping[str, int] | None = None,
        on_lost: Callable[[list[Failure]], None] | None = None,
    ):
        self._leaves = leaves
        self._on_lost = on_lost
        self._in_a_row = FailureStreak(tolerance, hooks or {})
        self.batches = 0
        self.tokens = 0
        self.dropped = 0
        self.truncated = 0
        self.split = 0
        self.reasons = Reasons()
        self._delivered: Counter[Outcome] = Counter()  # by leaf; None: the leaf is not known
        self._lost: Counter[tuple[int, str]] = Counter()  # by leaf and kind of loss
        self.log = FailureLog()
        self._filter_told = False

    def add(self, outcomes: Sequence[Outcome], *, batches: int = 1) -> None:
        """Call :meth:`check` and :meth:`count`.

        Raises:
            FatalSampleError: too many failures in a row.
        """
        self.check(outcomes)
        self.count(outcomes, batches=batches)

    def check(self, outcomes: Sequence[Outcome]) -> None:
        """Check whether the run may continue after these outcomes.

        Raises:
            FatalSampleError: too many failures in a row.
        """
        if _KINDS.isdisjoint(map(type, outcomes)):
            if outcomes:
                self._in_a_row.reset()
            return
        for outcome in outcomes:
            if not isinstance(outcome, Failure):
                self._in_a_row.reset(outcome if isinstance(outcome, Mark) else None)
            elif not outcome.dropped and (end := self._in_a_row.add(outcome)) is not None:
                raise end

    def count(self, outcomes: Sequence[Outcome], *, batches: int, tokens: int = 0) -> None:
        """Count the samples of a batch that is about to be delivered.

        Args:
            outcomes: outcomes of its samples, and of those lost before it.
            batches: 0 if there is no batch.
            tokens: tokens in the batch.
        """
        self.batches += batches
        self.tokens += tokens
        if _KINDS.isdisjoint(map(type, outcomes)):
            self._delivered.update(outcomes)
            return
        lost = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        self._delivered.update(outcome for outcome in outcomes if not isinstance(outcome, (Failure, Mark)))
        for failure in lost:
            self._count(failure)
        self.truncated += sum(outcome is Mark.TRUNCATED for outcome in outcomes)
        self.split += sum(outcome is Mark.SPLIT for outcome in outcomes)
        if self._on_lost is not None:
            self._on_lost([failure for failure in lost if not failure.dropped])

    @property
    def samples(self) -> int:
        """Number of samples delivered."""
        return self._delivered.total()

    @property
    def skipped(self) -> int:
        """Number of samples left out by request of a hook."""
        return sum(count for (_, _, _, skipped), count in self.reasons.items() if skipped) - self.dropped

    @property
    def failed(self) -> int:
        """Number of samples left out because of errors."""
        return sum(count for (_, _, _, skipped), count in self.reasons.items() if not skipped)

    def stats(self) -> dict[str, Any]:
        """Return the counts so far, as plain data."""
        return {
            "batches": self.batches,
            "samples": self.samples,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "failed": self.failed,
            "dropped": self.dropped,
            "fallbacks": self.log.fallbacks(),
            "datasets": self._by_leaf(),
            "reasons": [
                {"dataset": leaf, "stage": stage, "reason": reason, "skipped": skipped, "count": count}
                for (leaf, stage, reason, skipped), count in self.reasons.most_common()
            ],
        }

    def _by_leaf(self) -> list[dict[str, Any]]:
        """Return the counts of each data set that samples came from."""
        seen = {leaf for leaf in self._delivered if isinstance(leaf, int)} | {leaf for leaf, _ in self._lost}
        return [
            {
                "dataset": self._leaves[leaf].name,
                "path": self._leaves[leaf].path,
                "samples": self._delivered[leaf],
                **{kind: self._lost[leaf, kind] for kind in ("skipped", "failed", "dropped")},
            }
            for leaf in sorted(seen)
        ]

    def log_summary(self) -> None:
        """Log one paragraph on the samples that were left out, if there are any."""
        if not self.reasons:
            return
        total = self.samples + self.skipped + self.failed + self.dropped
        dropped = f", {self.dropped} were dropped" if self.dropped else ""
        lines = [f"{self.skipped} of {total} samples were skipped, {self.failed} failed{dropped}:"]
        lines += [
            f"  {count} x {reason[0]}, {reason[1]}: {self.reasons.text(*reason)}"
            for reason, count in self.reasons.most_common(20)
        ]
        if len(self.reasons) > 20:
            lines.append(f"  ... and {len(self.reasons) - 20} other reasons")
        logger.warning("\n".join(lines))

    def _count(self, failure: Failure) -> None:
        self.reasons.add(failure.key, failure.leaf, failure.stage, failure.reason, failure.skipped)
        self.dropped += failure.dropped
        if failure.address is not None:
            kind = "dropped" if failure.dropped else "skipped" if failure.skipped else "failed"
            self._lost[failure.address[0], kind] += 1
        self.log.tell(failure)
        lost = sum(self.reasons.values()) - self.dropped
        seen = self.samples
        if not self._filter_told and lost + seen >= _FILTER_SAMPLES and lost > _FILTER_SHARE * (lost + seen):
            self._filter_told = True
            logger.warning(
                "%d of %d samples were left out so far: this is a filter. Each costs a read for nothing. Find them "
                "once with `energon-lite measure PATH --task-encoder module:Class`, and pass use_measured_skips=True.",
                lost,
                lost + seen,
            )
