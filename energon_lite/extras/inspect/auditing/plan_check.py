"""Comparison of recorded digests with the plan, and the search for the sample that causes a difference."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from energon_lite.batching.digests import set_digest
from energon_lite.batching.plan import FixedPlan
from energon_lite.errors import UsageError
from energon_lite.extras.inspect.auditing.recorded_steps import RecordedStep
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.planned_dataset import PlannedDataset
from energon_lite.loading.iterators.state import State
from energon_lite.loading.makers.outcomes import Address
from energon_lite.order.hashing import MASK64

__all__ = ["Fault", "PlannedSteps", "check_steps", "explain"]

#: Number of replacements of a failed sample that are tried as an explanation.
_REPLACEMENTS = 16


@dataclass(frozen=True)
class Fault:
    """A step whose samples differ from the plan.

    Args:
        recorded: the step.
        difference: its digest minus the planned one, modulo 2**64.
        lost: a sample that it had once less than planned; None: not found.
        added: a sample that it had once more than planned; None: not found.
        failed: ``added`` is the replacement for ``lost``, which failed or was skipped.
    """

    recorded: RecordedStep
    difference: int
    lost: Address | None = None
    added: Address | None = None
    failed: bool = False


class PlannedSteps:
    """The micro-batches of a run, planned again.

    Args:
        dataset: data set of the run's loader.
        state: state of the loader, which has a change of the blend; None: there was none.

    Raises:
        UsageError: its batches are content-decided.
    """

    def __init__(self, dataset: SavableDataset, state: State | None = None):
        dataset = dataset.resolved.at(state)
        if not isinstance(dataset, PlannedDataset):
            raise UsageError(
                "what is in a step is decided by the hooks when they run, and not planned",
                fix="compare two runs with each other",
            )
        self.dataset = dataset
        self._plan = dataset.plan
        self._at = (0, dataset.plan.start, 0)  # pass, place, and number of the micro-batch

    def known(self, step: RecordedStep) -> bool:
        """Return whether a step belongs to this blend, and not to the one before a rebase."""
        rebase = self.dataset.rebase
        return rebase is None or (
            isinstance(self._plan, FixedPlan) and step.first * self._plan.chunk >= rebase.position
        )

    def addresses(self, pass_number: int, first: int, stop: int) -> list[Sequence[Address]]:
        """Return the samples of micro-batches ``first`` to ``stop - 1`` of a pass; fewer at its end."""
        number, place, position = self._at
        if number != pass_number:
            place = self._plan.start
            position = 0
        place, moved = self._plan.ahead(pass_number, place, first - position)
        places = []
        wanted = stop - first if moved == first - position else 0
        for _ in range(wanted):
            after, moved = self._plan.ahead(pass_number, place, 1)
            if not moved:
                break
            places.append(place)
            place = after
        self._at = pass_number, place, first + len(places)
        return [job.addresses for job in self.dataset.jobs(pass_number, places)]

    def digest(self, step: RecordedStep) -> int:
        """Return the digest of the samples that are planned for a step."""
        return sum(map(set_digest, self.addresses(step.pass_number, step.first, step.stop))) & MASK64


def check_steps(planned: PlannedSteps, steps: Iterable[RecordedStep]) -> Iterator[Fault]:
    """Yield the steps whose samples differ from the plan, with the sample at fault, if one sample explains it.

    Args:
        planned: the run, planned again.
        steps: recorded steps, ascending.

    Example:
        >>> for fault in check_steps(PlannedSteps(dataset), read_metrics("output/metrics.jsonl")):
        ...     print(fault.recorded.step, fault.lost, fault.added)
    """
    for step in steps:
        difference = (step.digest - planned.digest(step)) & MASK64 if planned.known(step) else 0
        if difference:
            yield explain(planned, step, difference)


def explain(planned: PlannedSteps, step: RecordedStep, difference: int) -> Fault:
    """Find the sample that was lost, doubled or exchanged. Candidates are the samples of the step and of the steps
    around it, and the replacements for failed samples.

    Args:
        step: the step with the difference.
        difference: its digest minus the planned one, modulo 2**64.
    """
    size = step.stop - step.first
    own = _by_hash(planned.addresses(step.pass_number, step.first, step.stop))
    around = _by_hash(planned.addresses(step.pass_number, max(0, step.first - size), step.stop + size))
    if difference in around:
        return Fault(step, difference, added=around[difference])
    if -difference & MASK64 in own:
        return Fault(step, difference, lost=own[-difference & MASK64])
    for hashed, address in own.items():
        if (other := (difference + hashed) & MASK64) in around:
            return Fault(step, difference, address, around[other])
    if planned.dataset.refills:
        replacement = planned.dataset.pipeline().samples.replacement
        for tried, (hashed, address) in itertools.product(range(1, _REPLACEMENTS), own.items()):
            stand_in = replacement(address, tried)
            if set_digest([stand_in]) == (difference + hashed) & MASK64:
                return Fault(step, difference, address, stand_in, failed=True)
    return Fault(step, difference)


def _by_hash(batches: Iterable[Sequence[Address]]) -> dict[int, Address]:
    return {set_digest([address]): tuple(address) for addresses in batches for address in addresses}
