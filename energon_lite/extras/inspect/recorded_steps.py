"""Digests recorded by a run: in a trainer's lines of metrics, or in the traces of its loaders."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from energon_lite.errors import UsageError
from energon_lite.order.hashing import MASK64


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
    runs = [[step for step in steps if (step.pass_number, step.first) >= begin] for steps in (ours, theirs)]
    place, begun, compared, difference = [0, 0], [0, 0], 0, 0
    while all(at < len(steps) for at, steps in zip(place, runs, strict=True)):
        ends = [(steps[at].pass_number, steps[at].stop) for at, steps in zip(place, runs, strict=True)]
        for run, sign in ((0, 1), (1, -1)):
            if ends[run] <= ends[1 - run]:
                difference += sign * runs[run][place[run]].digest
                place[run] += 1
        if ends[0] != ends[1]:
            continue
        compared += 1
        if difference & MASK64:
            return StepDifference(*(runs[run][begun[run] : place[run]] for run in (0, 1)))
        begun = list(place)
    return compared
