"""Run for ``energon-lite audit``: its data set and its states, and the steps that it recorded, by their digests: in a
trainer's lines of metrics, or in the traces of its loaders."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from energon_lite.cli.checkpoint import dataset_of_state, found_states, whole_state
from energon_lite.errors import StateError, UsageError
from energon_lite.extras.inspect.trace import is_trace
from energon_lite.loading.iterators.state import State
from energon_lite.order.hashing import MASK64

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
            return whole_state(found_states(given))
        return None if self.checkpoint is None else self.checkpoint["loader"]

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
        return dataset.state_at(at.stop)

    def _recorded(self, path: str) -> str | None:
        """File of recorded steps at a path; None: the path is a state."""
        if os.path.isdir(path):
            path = os.path.join(path, _METRICS)
            return path if os.path.isfile(path) else None
        return path if path.endswith(".jsonl") or is_trace(path) else None


def expanded(paths: Sequence[str]) -> tuple[str, ...]:
    """Replace paths with wildcards, which the shell does not expand in options, by the matching paths."""
    return tuple(match for path in paths for match in (sorted(glob.glob(path)) or [path]))


# -- recorded steps -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedStep:
    """A step, as a run recorded it.

    Args:
        step: its number in the run.
        pass_number: number of the pass over the data.
        first, stop: its micro-batches, numbered over all ranks in the pass.
        digest: digest of their samples.
    """

    step: int
    pass_number: int
    first: int
    stop: int
    digest: int


class StepDifference(NamedTuple):
    """The first place at which the samples of two runs differ: the steps of each run there.

    There is one step of each, or as many as end at a common micro-batch.
    """

    ours: list[RecordedStep]
    theirs: list[RecordedStep]


def read_metrics(path: str | os.PathLike[str]) -> list[RecordedStep]:
    """Return the steps of a trainer's ``metrics.jsonl``.

    Raises:
        UsageError: there are none with digests.
    """
    steps: dict[int, RecordedStep] = {}
    for line in json_lines(path):
        if {"step", "digest", "position", "micro_batches"} <= line.keys():
            step, stop, count = (int(line[name]) for name in ("step", "position", "micro_batches"))
            steps[step] = RecordedStep(step, 0, stop - count, stop, int(line["digest"], 16))
    if not steps:
        raise UsageError(
            "no line has the digest of a step", where=os.fspath(path), fix="give the metrics.jsonl of a trainer's run"
        )
    return [steps[step] for step in sorted(steps)]


def read_traces(paths: Iterable[str | os.PathLike[str]]) -> list[RecordedStep]:
    """Return the steps of the traces of all ranks' loaders. Steps that a later run in a file repeated replace earlier.

    Raises:
        UsageError: files of some ranks are missing, or were written without digests.
    """
    digests: dict[tuple[int, int, int], dict[int, int]] = {}  # by pass, position and number of ranks
    for path in paths:
        for (place, world, rank), digest in _of_rank(path).items():
            digests.setdefault((*place, world), {})[rank] = digest
    steps = list[RecordedStep]()
    parts = list[tuple[int, int, int]]()
    for (pass_number, position, world), ranks in sorted(digests.items()):
        if len(ranks) == world:
            digest = sum(ranks.values()) & MASK64
            steps.append(RecordedStep(position // world, pass_number, position, position + world, digest))
        else:
            parts.append((pass_number, position, world))
    # A run resumed on fewer ranks leaves lines of the others for repeated steps; the last step may be incomplete.
    behind = max(((step.pass_number, step.stop) for step in steps), default=(0, 0))
    done = {(step.pass_number, number) for step in steps for number in range(step.first, step.stop)}
    for pass_number, position, world in parts:
        if ((pass_number, position) < behind and (pass_number, position) not in done) or not steps:
            missing = min(set(range(world)) - digests[pass_number, position, world].keys())
            raise UsageError(
                f"at micro-batch {position} rank {missing} of {world} has no trace",
                fix="give the traces of all data-parallel ranks",
            )
    if not steps:
        raise UsageError("no line has a digest", fix="give what loaders with trace= wrote, with this release or later")
    return steps


def _of_rank(path: str | os.PathLike[str]) -> dict[tuple[tuple[int, int], int, int], int]:
    """Return the digests in a file, by pass and position, number of ranks, and rank; of repeated steps, the last."""
    digests: dict[tuple[tuple[int, int], int, int], int] = {}
    rank, world, is_new = 0, 0, False
    for line in json_lines(path):
        if line.get("format") == "energon_lite.trace":
            rank, world, is_new = int(line["rank"]), int(line.get("world_size", 0)), True
        elif isinstance(line.get("digest"), str) and world:
            place = int(line["pass"]), int(line["position"])
            if is_new:
                digests = {key: digest for key, digest in digests.items() if key[0] < place}
                is_new = False
            digests[place, world, rank] = int(line["digest"], 16)
    return digests


def json_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file with one in each line; other lines are passed over."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue  # a line that a crash has cut
            if isinstance(line, dict):
                yield line


def missing_steps(steps: Sequence[RecordedStep], end: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Return stretches of micro-batches without a record: between steps of a pass, and from the last step to the end.

    Args:
        steps: ascending. Micro-batches before the first one are not missing: the record may have begun late.
        end: pass and micro-batch of the loader's state.

    Returns:
        Pass, first and stop of each stretch.
    """
    ends = [*((step.pass_number, step.first) for step in steps[1:]), end]
    return [
        (number, step.stop, first)
        for step, (number, first) in zip(steps, ends, strict=False)
        if number == step.pass_number and first > step.stop
    ]


def first_difference(ours: Sequence[RecordedStep], theirs: Sequence[RecordedStep]) -> StepDifference | int:
    """Return the first place at which the samples of two runs differ, whatever their ranks and steps are.

    Returns:
        The difference, or, if there is none, the number of places at which the runs were compared.

    Example:
        >>> first_difference(read_metrics("a/metrics.jsonl"), read_metrics("b/metrics.jsonl"))
        1200
    """
    begin = max((steps[0].pass_number, steps[0].first) for steps in (ours, theirs))
    runs = [
        {(step.pass_number, step.stop): step for step in steps if (step.pass_number, step.first) >= begin}
        for steps in (ours, theirs)
    ]
    sums = [dict(zip(run, accumulate(step.digest for step in run.values()), strict=True)) for run in runs]
    ends = sorted(runs[0].keys() & runs[1].keys())
    for before, end in pairwise([begin, *ends]):
        if (sums[0][end] - sums[1][end]) & MASK64:
            return StepDifference(*([step for at, step in run.items() if before < at <= end] for run in runs))
    return len(ends)
