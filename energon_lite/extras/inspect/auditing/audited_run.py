"""Run for ``energon-lite audit``: its recorded steps, its data set and its states."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from energon_lite.cli.checkpoint import dataset_of_state, found_states
from energon_lite.errors import StateError, UsageError
from energon_lite.extras.inspect.auditing.plan_check import PlannedSteps
from energon_lite.extras.inspect.auditing.recorded_steps import RecordedStep, read_metrics, read_traces
from energon_lite.extras.inspect.tracing.command import is_trace
from energon_lite.loading.iterators.state import State
from energon_lite.loading.states.merge import merged

__all__ = ["AuditedRun"]

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
                f"what {self.name} was trained on is not known",
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
        last = self.steps[-1] if self.steps else None
        if step is None and last is None:
            return self.state
        at = last if step is None else next((recorded for recorded in self.steps if recorded.step == step), None)
        if at is None:
            raise UsageError(f"{self.name} has not recorded step {step}", fix="give a step of it")
        dataset = self.dataset if self.state is None else self.dataset.at(self.state)
        known = self.state
        if known is not None and (known["pass_number"], known["position"]) == (at.pass_number, at.stop):
            return known
        if at.pass_number or (known is not None and known["kind"] == "lanes"):
            if step is None and known is not None:
                return known
            raise StateError(
                f"where the loader was after step {step} is known to its state only",
                fix="give that with --state, or leave out --until",
            )
        state: State = dataset.state_at(at.stop)
        return state

    def _recorded(self, path: str) -> str | None:
        """File of recorded steps at a path; None: the path is a state."""
        if os.path.isdir(path):
            path = os.path.join(path, _METRICS)
            return path if os.path.isfile(path) else None
        return path if path.endswith(".jsonl") or is_trace(path) else None


def expanded(paths: Sequence[str]) -> tuple[str, ...]:
    """Replace paths with wildcards, which the shell does not expand in options, by the matching paths."""
    return tuple(match for path in paths for match in (sorted(glob.glob(path)) or [path]))
