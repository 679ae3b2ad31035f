"""Run for ``energon-lite audit``: its recorded steps, its data set and its states, and their comparison with
the plan."""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from energon_lite.batching.digests import set_digest
from energon_lite.batching.plan import FixedPlan
from energon_lite.cli.checkpoint import dataset_of_state, found_states
from energon_lite.errors import StateError, UsageError
from energon_lite.extras.inspect.recorded_steps import RecordedStep, read_metrics, read_traces
from energon_lite.extras.inspect.trace import is_trace
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.planned_dataset import PlannedDataset
from energon_lite.loading.iterators.state import State
from energon_lite.loading.makers.outcomes import Address
from energon_lite.loading.saved_states import merged
from energon_lite.order.hashing import MASK64

#: Number of replacements of a failed sample that are tried as an explanation.
_REPLACEMENTS = 16


@dataclass(frozen=True)
class Fault:
    """A step whose samples differ from the plan.

    Args:
        recorded: the step.
        lost: a sample that it had once less than planned; None: not found.
        added: a sample that it had once more than planned; None: not found.
        failed: ``added`` is the replacement for ``lost``, which failed or was skipped.
    """

    recorded: RecordedStep
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
                "the samples of a step are not planned: hooks decide them when they run",
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
            place, position = self._plan.start, 0
        place, moved = self._plan.ahead(pass_number, place, first - position)
        places = []
        for _ in range(stop - first if moved == first - position else 0):
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
        return Fault(step, added=around[difference])
    if -difference & MASK64 in own:
        return Fault(step, lost=own[-difference & MASK64])
    for hashed, address in own.items():
        if (other := (difference + hashed) & MASK64) in around:
            return Fault(step, address, around[other])
    if planned.dataset.refills:
        replacement = planned.dataset.runner().replacement
        for tried, (hashed, address) in itertools.product(range(1, _REPLACEMENTS), own.items()):
            stand_in = replacement(address, tried)
            if set_digest([stand_in]) == (difference + hashed) & MASK64:
                return Fault(step, address, stand_in, failed=True)
    return Fault(step)


def _by_hash(batches: Iterable[Sequence[Address]]) -> dict[int, Address]:
    return {set_digest([address]): tuple(address) for addresses in batches for address in addresses}


_METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class AuditedRun:
    """Files of a run, with the steps, the data set and the state that they give.

    Args:
        paths: the output folder of a trainer, its metrics.jsonl, traces of loaders, or states of them.
        data: path of its data set, if no trainer's checkpoint has it.
        states: states of its loader, instead of a trainer's newest checkpoint.
        options: of :func:`~energon_lite.cli.checkpoint.dataset_of_state`.
    """

    paths: tuple[str, ...]
    data: str | None
    states: tuple[str, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the run in messages."""
        return self.paths[0] if len(self.paths) == 1 else f"{self.paths[0]} and {len(self.paths) - 1} more"

    @cached_property
    def steps(self) -> list[RecordedStep]:
        """Recorded steps; empty if only states are given.

        Raises:
            UsageError: its files have no digests.
        """
        files = [path for path in map(self._recorded, self.paths) if path is not None]
        if not files:
            return []
        if is_trace(files[0]):
            return read_traces(files)
        if len(files) > 1:
            raise UsageError("several files of metrics", fix="give one run, and the other one with --against")
        return read_metrics(files[0])

    @cached_property
    def checkpoint(self) -> dict[str, Any] | None:
        """Contents of the newest checkpoint of a trainer, without tensors; None: there is none."""
        from energon_lite.trainer import latest_checkpoint, read_state

        for path in self.states:
            if os.path.exists(os.path.join(path, ".metadata")):
                return read_state(path)
        for path in self.paths:
            folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
            place = latest_checkpoint(os.path.join(folder, "checkpoints")) if os.path.isdir(folder) else None
            if place is not None:
                return read_state(place)
        return None

    @cached_property
    def state(self) -> State | None:
        """Newest state of its loader; None: there is none."""
        given = self.states or tuple(path for path in self.paths if self._recorded(path) is None)
        if given and not any(os.path.isdir(os.path.join(path, "checkpoints")) for path in given):
            parts = found_states(given)
            return merged([part.state for part in parts], [part.name for part in parts])
        state: State | None = None if self.checkpoint is None else self.checkpoint["loader"]
        return state

    @cached_property
    def dataset(self) -> Any:
        """Data set of its loader.

        Raises:
            UsageError: neither a checkpoint nor the options name it.
        """
        if self.data is not None and self.state is not None:
            return dataset_of_state(self.state, self.data, **self.options)
        if self.checkpoint is None:
            raise UsageError(
                f"the data of {self.name} is unknown",
                fix="give the output folder of a trainer that has a checkpoint; or --data, and --state of its loader",
            )
        from energon_lite.trainer import config_from_dict, training_dataset

        return training_dataset(config_from_dict(self.checkpoint["config"]))

    def planned(self) -> PlannedSteps:
        """The steps of the run, planned again."""
        return PlannedSteps(self.dataset, self.state)

    def state_after(self, step: int | None) -> State | None:
        """State of its loader after a step, or after the last known step; None: at the start.

        Raises:
            UsageError: the step was not recorded.
            StateError: the step is content-decided, and there is no checkpoint of it.
        """
        known = self.state
        if step is None and not self.steps:
            return known
        wanted = self.steps[-1:] if step is None else [recorded for recorded in self.steps if recorded.step == step]
        at = next(iter(wanted), None)
        if at is None:
            raise UsageError(f"{self.name} has not recorded step {step}", fix="give a step of it")
        dataset = self.dataset if known is None else self.dataset.at(known)
        if known is not None and (known["pass_number"], known["position"]) == (at.pass_number, at.stop):
            return known
        if at.pass_number or (known is not None and known["kind"] == "lanes"):
            if step is None and known is not None:
                return known
            raise StateError(
                f"only the loader's state tells its position after step {step}",
                fix="give that with --state, or leave out --until",
            )
        after: State = dataset.state_at(at.stop)
        return after

    def _recorded(self, path: str) -> str | None:
        """File of recorded steps at a path; None: the path is a state."""
        if os.path.isdir(path):
            path = os.path.join(path, _METRICS)
            return path if os.path.isfile(path) else None
        return path if path.endswith(".jsonl") or is_trace(path) else None


def expanded(paths: Sequence[str]) -> tuple[str, ...]:
    """Replace paths with wildcards, which the shell does not expand in options, by the matching paths."""
    return tuple(match for path in paths for match in (sorted(glob.glob(path)) or [path]))
