"""``energon-lite trace``: what a loader wrote down about its batches, as tables, and as a picture of time."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import click

from energon_lite.cli.local_paths import ExistingPath
from energon_lite.errors import EnergonLiteError, UsageError

__all__ = ["Run", "chrome_events", "command", "read_runs", "sightings"]

_STAGES = ("read", "decode", "hooks", "batch", "transfer")
_FORMAT, _VERSION = "energon_lite.trace", 1


@dataclass
class Run:
    """One loader's part of a file.

    Args:
        rank: data-parallel.
        clock: seconds to be added to the times, for the time of day.
        datasets: name and path of each data set.
        batches: the lines.
    """

    rank: int
    clock: float
    datasets: list[tuple[str, str]] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)


@click.command(name="trace", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("files", nargs=-1, required=True, type=ExistingPath(dir_okay=False))
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=str, dir_okay=False),
    help="Write a Chrome trace (JSON), for chrome://tracing or ui.perfetto.dev.",
)
@click.option("--sample", "-s", "keys", multiple=True, help="Show when the sample with this key was seen.")
@click.option("--slowest", type=click.IntRange(min=0), default=10, show_default=True, help="So many slow samples.")
def command(files: tuple[str, ...], output: str | None, keys: tuple[str, ...], slowest: int) -> None:
    """Show what loaders with trace="trace.jsonl" wrote into FILES, one for each rank.

    \b
    read      bytes from storage
    decode    parts to objects, and to the fields of the sample
    hooks     encode_sample and the other hooks for samples and packs
    batch     batch and encode_batch
    transfer  from the worker to the trainer
    other     the rest of the worker's time

    \b
    Example:
      energon-lite trace trace.jsonl -o trace.json
      energon-lite trace trace.rank*.jsonl --sample 000123

    With --sample the exit code is 1 if a key was not seen, and no data set of the trace has it.
    """
    runs, unread = read_runs(files)
    if unread:
        click.secho(f"{unread} lines cannot be read, and are left out", fg="yellow", err=True)
    if not any(run.batches for run in runs):
        raise UsageError(f"there is no batch in {', '.join(files)}", fix="trace some steps of a loop first")
    unknown = False
    if keys:
        for key in keys:
            known, lines = sightings(runs, key)
            unknown |= not known
            for line in lines:
                click.echo(line)
    else:
        for line in _summary(runs, slowest):
            click.echo(line)
    if output is not None:
        with open(output, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": list(chrome_events(runs)), "displayTimeUnit": "ms"}, file)
        click.echo(f"\nThe trace is in {output}; open it at ui.perfetto.dev or chrome://tracing.")
    if unknown:
        sys.exit(1)


def read_runs(files: Sequence[str]) -> tuple[list[Run], int]:
    """The runs in files, and the number of lines that are cut off or damaged.

    Raises:
        UsageError: a file is not a trace, or of a later version.
    """
    runs: list[Run] = []
    unread = 0
    for path in files:
        run: Run | None = None
        with open(path, encoding="utf-8", errors="replace") as file:
            for text in file:
                try:
                    line = json.loads(text)
                    if line.get("format") == _FORMAT:
                        _check_version(line, path)
                        datasets = [(str(name), str(path)) for name, path in line.get("datasets", ())]
                        run = Run(int(line["rank"]), float(line["clock"]), datasets)
                        runs.append(run)
                    elif run is not None:
                        run.batches.append({"pass": 0, "keys": [], "stages": {}, "samples": []} | line)
                        float(line["asked"]), float(line["delivered"]), int(line["step"])
                    else:
                        raise UsageError("this is not a trace", where=path, fix="give what a loader with trace= wrote")
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    if isinstance(error, UsageError):
                        raise
                    unread += 1
    return runs, unread


def _check_version(line: dict[str, Any], path: str) -> None:
    if line["version"] > _VERSION:
        raise UsageError(
            f"the trace has version {line['version']}, and this library reads up to {_VERSION}",
            where=path,
            fix="upgrade the library",
        )


# -- tables ---------------------------------------------------------------------------------------------------------


def _summary(runs: Sequence[Run], slowest: int) -> Iterator[str]:
    batches = [batch for run in runs for batch in run.batches]
    waited = sum(batch["delivered"] - batch["asked"] for batch in batches)
    span = sum(_span(run) for run in runs)
    samples = sum(len(_sources(batch)) for batch in batches)
    yield (
        f"{len(batches):,} batches, {samples:,} samples, {span:,.2f} s; "
        f"the trainer waited {waited:,.2f} s of them ({100 * waited / max(span, 1e-9):.1f} %)"
    )
    yield ""
    yield from _stage_table(batches)
    timed = [
        (seconds, key, run.rank, batch) for run in runs for batch in run.batches for key, seconds in batch["samples"]
    ]
    timed.sort(key=lambda one: -one[0])
    if timed and slowest:
        yield ""
        yield "slowest samples        ms  rank  pass      step"
        for seconds, key, rank, batch in timed[:slowest]:
            yield f"{key:16}{1e3 * seconds:10.2f}{rank:6}{batch['pass']:6}{batch['step']:10,}"


def _stage_table(batches: Sequence[dict[str, Any]]) -> Iterator[str]:
    totals: dict[str, float] = defaultdict(float)
    most: dict[str, float] = defaultdict(float)
    made = 0
    for batch in batches:
        stages = dict(batch["stages"])
        if "began" in batch:
            made += 1
            inside = sum(seconds for stage, seconds in stages.items() if stage != "transfer")
            stages["other"] = max(0.0, batch["ended"] - batch["began"] - inside)
        for stage, seconds in stages.items():
            totals[stage] += seconds
            most[stage] = max(most[stage], seconds)
    whole = sum(totals.values())
    yield "stage       seconds      %   ms a batch   at most"
    for stage in (*_STAGES, "other"):
        if stage in totals:
            yield (
                f"{stage:10}{totals[stage]:9.3f}{100 * totals[stage] / max(whole, 1e-12):7.1f}"
                f"{1e3 * totals[stage] / max(made, 1):13.3f}{1e3 * most[stage]:10.3f}"
            )


def sightings(runs: Sequence[Run], key: str) -> tuple[bool, list[str]]:
    """When the samples with a key were seen, also inside of packs; and whether there is such a sample at all."""
    from datetime import datetime

    lines = []
    for run in runs:
        for batch in run.batches:
            sources = _sources(batch)
            leaves = list(dict.fromkeys(leaf for leaf, name in sources if name == key))
            for leaf in leaves:
                when = run.clock + batch["delivered"]
                words = [f"rank {run.rank}, pass {batch['pass']}, step {batch['step']:,}"]
                if [name for _, name in sources] == batch["keys"]:  # else it stands in a pack, or wherever hooks put it
                    words.append(f"place {sources.index((leaf, key))}")
                if len(run.datasets) > 1 and leaf is not None:
                    words.append(run.datasets[leaf][0])
                words += [f"{1e3 * seconds:.2f} ms" for name, seconds in batch["samples"] if name == key][:1]
                shown = datetime.fromtimestamp(when).isoformat(" ", "milliseconds")
                lines.append((when, f"  {shown}  {', '.join(words)}"))
    if not lines:
        return _unseen(runs, key)
    times = "1 time" if len(lines) == 1 else f"{len(lines)} times"
    return True, [f"{key}: seen {times}", *(line for _, line in sorted(lines))]


def _sources(batch: dict[str, Any]) -> list[tuple[int | None, str]]:
    """Number of the data set, and key, of each sample in a batch; else the keys that the batch itself has."""
    found = batch.get("sources")
    return [(None, key) for key in batch["keys"]] if found is None else [(leaf, key) for leaf, key in found]


def _unseen(runs: Sequence[Run], key: str) -> tuple[bool, list[str]]:
    """What is to be said of a sample that is in no batch: that it is still to come, or that there is none."""
    from energon_lite.storage.read.webdataset import WebdatasetSource

    closed = []
    paths = list(dict.fromkeys(path for run in runs for _, path in run.datasets))
    for path in paths:
        try:
            index = WebdatasetSource.open(path).index
        except (EnergonLiteError, OSError):
            closed.append(path)
            continue
        for shard, (first, stop) in zip(index.shard_names, pairwise(index.shards[:, 3].tolist()), strict=True):
            if key in index.keys(first, stop):
                return True, [f"{key}: not seen so far; it is in {path}, {shard}"]
    if closed or not paths:
        which = ", ".join(closed) or "the data (the trace does not name it)"
        return False, [f"{key}: not seen so far; {which} cannot be searched for it"]
    return False, [f"{key}: no data set of the trace has a sample with this key ({', '.join(paths)})"]


def _span(run: Run) -> float:
    if not run.batches:
        return 0.0
    return float(max(b["delivered"] for b in run.batches) - min(b["asked"] for b in run.batches))


# -- a picture of time ----------------------------------------------------------------------------------------------


def chrome_events(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Events in Chrome's trace format: a process for each rank, a line for the trainer and one for each worker.

    The stages of a batch mix sample by sample; they are drawn one behind the other, each with all of its time.
    """
    base = min((run for run in runs if run.batches), key=lambda run: run.clock + _first(run))
    for number, run in enumerate(runs):
        yield _named("process_name", number, 0, f"rank {run.rank}")
        yield _named("thread_name", number, 0, "trainer")
        lines: dict[str, int] = {}
        before: float | None = None
        shift = (run.clock - base.clock) - _first(base)  # small numbers first: times of day have no microseconds left
        for batch in run.batches:
            title = f"step {batch['step']}"
            details = {"pass": batch["pass"], "keys": batch["keys"]}
            if before is not None:
                yield _event("step", number, 0, before + shift, batch["asked"] + shift, {})
            yield _event(f"wait for {title}", number, 0, batch["asked"] + shift, batch["delivered"] + shift, details)
            before = batch["delivered"]
            if "began" not in batch:
                continue
            worker = " ".join(map(str, batch.get("worker", ())))
            if worker not in lines:
                lines[worker] = len(lines) + 1
                yield _named("thread_name", number, lines[worker], f"worker {worker}")
            line = lines[worker]
            yield _event(title, number, line, batch["began"] + shift, batch["ended"] + shift, details)
            at = batch["began"] + shift
            for stage in _STAGES[:-1]:
                if seconds := batch["stages"].get(stage):
                    yield _event(stage, number, line, at, at + seconds, {})
                    at += seconds
            if "received" in batch:
                ended = batch["received"] + shift
                took = batch["stages"].get("transfer", 0.0)
                yield _event(f"transfer of {title}", number, 0, ended - took, ended, {})


def _first(run: Run) -> float:
    return float(min(min(batch["asked"], batch.get("began", batch["asked"])) for batch in run.batches))


def _event(name: str, process: int, line: int, began: float, ended: float, details: dict[str, Any]) -> dict[str, Any]:
    event = {"name": name, "ph": "X", "pid": process, "tid": line, "ts": 1e6 * began, "dur": 1e6 * (ended - began)}
    return event | ({"args": details} if details else {})


def _named(kind: str, process: int, line: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": line, "args": {"name": name}}
