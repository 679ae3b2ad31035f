"""Traces of loaders: the observer that writes a line for each batch, and ``energon-lite trace``, which reads them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from heapq import nlargest
from itertools import chain, pairwise
from typing import Any, TextIO

import click

from energon_lite.batching.digests import digest_text
from energon_lite.cli import ExistingPath, aligned
from energon_lite.errors import EnergonLiteError, UsageError, counted, field_of
from energon_lite.loading.batch_observer import BatchEvent, BatchObserver, ObservedRank
from energon_lite.storage.read.webdataset import WebdatasetSource

logger = logging.getLogger(__name__)


class TraceFile(BatchObserver):
    """Observer that writes a line of JSON for each delivered batch; ``energon-lite trace`` reads the file.

    Args:
        path: path of the file. With several ranks each has its own: ``trace.rank3.jsonl`` for ``trace.jsonl``; with
            files of workers, the paths must already differ by rank.
        observed: the rank and its leaves: each line identifies samples by leaf number and key. ``worker_files`` are
            paths of the files of this rank's workers, in their order: each gets a line for each delivered batch that
            its worker made.

    A file that cannot be written causes one warning; the run continues without it.
    """

    times_stages = True

    def __init__(self, path: str | os.PathLike[str], observed: ObservedRank):
        rank, world_size, workers = observed.rank, observed.world_size, observed.worker_files
        stem, end = os.path.splitext(os.fspath(path))
        self.path = f"{stem}.rank{rank}{end}" if world_size > 1 and not workers else os.fspath(path)
        self._rank = rank
        self._world = world_size
        self._lines = _Lines(self.path)
        self._workers = [_Lines(file) for file in workers]
        for number, lines in enumerate(self._workers):
            lines.write({"t": "Worker.__init__", "r": rank, "worker_number": number})
        self._count = 0
        clock = time.time() - time.monotonic()
        header = {"format": _FORMAT, "version": _VERSION, "rank": rank, "pid": os.getpid(), "clock": clock}
        header |= {"world_size": world_size, "t": "SavableLoader.__init__", "r": rank}
        self._lines.write(header | {"datasets": [[leaf.name, leaf.path] for leaf in observed.leaves]})

    def on_batch(self, event: BatchEvent) -> None:
        """Write the line of a delivered batch."""
        result = event.result
        pass_number, position = event.step
        made = result.trace or {}
        keys = _keys_of(result.batch)
        step = position // self._world
        line: dict[str, Any] = {"pass": pass_number, "step": step, "asked": event.asked, "delivered": event.delivered}
        line |= {"position": position, "digest": digest_text(result.digest), "t": "SavableDataLoader.yield"}
        # The same record for programs that read Energon's debug files.
        line |= {"r": self._rank, "idx": step, "global_idx": self._count}
        self._count += 1
        if made.get("worker_number", len(self._workers)) < len(self._workers):
            self._workers[made["worker_number"]].write(line | {"t": "Worker.batch", "keys": keys} | made)
        self._lines.write(line | {"keys": keys or [key for _, key in made.get("sources", ())]} | made)


class _Lines:
    """File of JSON lines that is flushed after each line, so that it shows the last lines before a crash."""

    def __init__(self, path: str):
        self.path = path
        self._file: TextIO | None = None
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        except OSError as error:
            self._give_up(error)

    def write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps(line) + "\n")
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # the same error again
                file.close()
        logger.warning(
            "the trace file %s cannot be written: %s. The run goes on without it.", self.path, error.strerror or error
        )


def _keys_of(batch: Any) -> list[str]:
    """Return the keys of the samples in a batch, if it has them."""
    key_or_keys = field_of(batch, "__key__")
    if isinstance(key_or_keys, str):
        return [key_or_keys]
    return [str(key) for key in key_or_keys] if isinstance(key_or_keys, (list, tuple)) else []


_STAGES = ("read", "decode", "hooks", "batch", "transfer")
_FORMAT = "energon_lite.trace"
_VERSION = 1


@dataclass
class Run:
    """One loader's part of a trace file.

    Args:
        rank: data-parallel rank.
        clock: seconds to add to the times to get the time of day.
        datasets: name and path of each data set.
        batches: the lines; each has its ``samples`` with their seconds, and its ``sources``: number of the data set,
            and key.
    """

    rank: int
    clock: float
    datasets: list[tuple[str, str]] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)


@click.command(name="trace", context_settings={"show_default": True})
@click.argument("files", nargs=-1, required=True, type=ExistingPath(dir_okay=False))
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False), help="Write a Chrome trace (JSON), for ui.perfetto.dev."
)
@click.option("--key", "-k", "keys", multiple=True, help="Show when the sample with this key was used.")
@click.option("--slowest", type=click.IntRange(min=0), default=10, help="Number of slow samples to list.")
@click.option("--json", "as_json", is_flag=True, help="Write the tables as JSON.")
def command(files: tuple[str, ...], output: str | None, keys: tuple[str, ...], slowest: int, as_json: bool) -> None:
    """Show the traces FILES of loaders with trace="trace.jsonl", one file for each rank.

    \b
    read      bytes from storage
    decode    parts to objects, and to the fields of the sample
    hooks     encode_sample and the other hooks for samples and packs
    batch     batch and encode_batch
    transfer  from the worker to the trainer
    other     the remaining time of the worker

    \b
    Example:
      energon-lite trace trace.jsonl -o trace.json
      energon-lite trace trace.rank*.jsonl --key 000123

    With --key the exit code is 1 if a key was not used, and no data set of the trace has it.
    """
    runs, unread = read_runs(files)
    if unread:
        click.secho(f"{counted(unread, 'line')} left out: unreadable", fg="yellow", err=True)
    if not any(run.batches for run in runs):
        raise UsageError(f"there is no batch in {', '.join(files)}", fix="trace some steps of a loop first")
    found = {key: sightings(runs, key) for key in keys}
    if as_json:
        seen = {key: {"known": known, "seen": lines[1:]} for key, (known, lines) in found.items()}
        click.echo(json.dumps({**_plain(runs, slowest), "keys": seen}, indent=2))
    else:
        for line in chain(*(found[key][1] for key in keys)) if keys else _summary(runs, slowest):
            click.echo(line)
    if output is not None:
        with open(output, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": list(chrome_events(runs)), "displayTimeUnit": "ms"}, file)
        click.echo(f"\nThe trace is in {output}; open it at ui.perfetto.dev or chrome://tracing.", err=as_json)
    if not all(known for known, _ in found.values()):
        sys.exit(1)


def read_runs(files: Sequence[str]) -> tuple[list[Run], int]:
    """Read the runs in files, and count the lines that are truncated or damaged.

    Raises:
        UsageError: a file is not a trace, or has a later version.
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
                        run = _run_of(line, path)
                        runs.append(run)
                    elif run is None:
                        raise UsageError("this is not a trace", where=path, fix="give what a loader with trace= wrote")
                    else:
                        run.batches.append(_batch_of(line))
                except UsageError:
                    raise
                except (ValueError, KeyError, TypeError, AttributeError):
                    unread += 1
    return runs, unread


def is_trace(path: str) -> bool:
    """True if a file starts like a loader's trace."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return f'"format": "{_FORMAT}"' in file.readline()


def _run_of(line: dict[str, Any], path: str) -> Run:
    if line["version"] > _VERSION:
        what = f"the trace has version {line['version']}, and this library reads up to {_VERSION}"
        raise UsageError(what, where=path, fix="upgrade the library")
    datasets = [(str(name), str(path)) for name, path in line.get("datasets", ())]
    return Run(int(line["rank"]), float(line["clock"]), datasets)


def _batch_of(line: dict[str, Any]) -> dict[str, Any]:
    batch: dict[str, Any] = {"pass": 0, "keys": [], "stages": {}, "samples": []} | line
    float(batch["asked"]), float(batch["delivered"]), int(batch["step"])
    # A line without sources has the keys of the batch itself.
    sources = batch.get("sources", [(None, key) for key in batch["keys"]])
    batch["sources"] = [(leaf, key) for leaf, key in sources]
    return batch


# -- tables ---------------------------------------------------------------------------------------------------------


def _summary(runs: Sequence[Run], slowest: int) -> Iterator[str]:
    batches = [batch for run in runs for batch in run.batches]
    plain = _plain(runs, 0)
    traced = [run.batches for run in runs if run.batches]
    span = sum(max(one["delivered"] for one in part) - min(one["asked"] for one in part) for part in traced)
    yield (
        f"{counted(len(batches), 'batch')}, {counted(plain['samples'], 'sample')}, {span:,.2f} s; "
        f"the trainer waited {plain['waited']:,.2f} s of them ({100 * plain['waited'] / max(span, 1e-9):.1f} %)"
    )
    yield ""
    yield from aligned([["stage", "seconds", "%", "ms a batch", "at most"], *_stage_rows(batches)])
    if timed := _slowest(runs, slowest):
        yield ""
        rows = [
            [key, f"{1e3 * seconds:.2f}", str(rank), str(batch["pass"]), f"{batch['step']:,}"]
            for seconds, key, rank, batch in timed
        ]
        yield from aligned([["slowest samples", "ms", "rank", "pass", "step"], *rows])


def _plain(runs: Sequence[Run], slowest: int) -> dict[str, Any]:
    """Summary as plain data: total seconds by stage, and the slowest samples."""
    batches = [batch for run in runs for batch in run.batches]
    slow = [
        {"key": key, "seconds": seconds, "rank": rank, "pass": batch["pass"], "step": batch["step"]}
        for seconds, key, rank, batch in _slowest(runs, slowest)
    ]
    return {
        "ranks": sorted({run.rank for run in runs}),
        "batches": len(batches),
        "samples": sum(len(batch["sources"]) for batch in batches),
        "waited": sum(batch["delivered"] - batch["asked"] for batch in batches),
        "stages": {stage: sum(seconds) for stage, seconds in _stage_times(batches).items()},
        "slowest": slow,
    }


def _slowest(runs: Sequence[Run], count: int) -> list[tuple[float, str, int, dict[str, Any]]]:
    """Seconds, key, rank and batch of the samples that took longest."""
    batches = ((run.rank, batch) for run in runs for batch in run.batches)
    every = ((seconds, key, rank, batch) for rank, batch in batches for key, seconds in batch["samples"])
    return nlargest(count, every, key=lambda entry: entry[0])


def _stage_times(batches: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Seconds of the batches by stage, with those outside of all stages as "other"."""
    times: dict[str, list[float]] = defaultdict(list)
    for batch in batches:
        for stage, seconds in batch["stages"].items():
            times[stage].append(seconds)
        if "began" in batch:
            inside = sum(seconds for stage, seconds in batch["stages"].items() if stage != "transfer")
            times["other"].append(max(0.0, batch["ended"] - batch["began"] - inside))
    return times


def _stage_rows(batches: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    times = _stage_times(batches)
    made, whole = max(len(times["other"]), 1), max(sum(map(sum, times.values())), 1e-12)
    for stage in (*_STAGES, "other"):
        if durations := times[stage]:
            total = sum(durations)
            row = f"{total:.3f} {100 * total / whole:.1f} {1e3 * total / made:.3f} {1e3 * max(durations):.3f}"
            yield [stage, *row.split()]


def sightings(runs: Sequence[Run], key: str) -> tuple[bool, list[str]]:
    """Describe the occurrences of samples with a key, also in packs; the flag is True if such a sample exists."""
    lines = []
    for run in runs:
        for batch in run.batches:
            sources = batch["sources"]
            for leaf in dict.fromkeys(leaf for leaf, name in sources if name == key):
                when = run.clock + batch["delivered"]
                words = [f"rank {run.rank}, pass {batch['pass']}, step {batch['step']:,}"]
                if [name for _, name in sources] == batch["keys"]:  # else the sample is in a pack, or moved by hooks
                    words.append(f"place {sources.index((leaf, key))}")
                if len(run.datasets) > 1 and leaf is not None:
                    words.append(run.datasets[leaf][0])
                words += [f"{1e3 * seconds:.2f} ms" for name, seconds in batch["samples"] if name == key][:1]
                shown = datetime.fromtimestamp(when).isoformat(" ", "milliseconds")
                lines.append((when, f"  {shown}  {', '.join(words)}"))
    if not lines:
        return _unseen(runs, key)
    return True, [f"{key}: seen {counted(len(lines), 'time')}", *(line for _, line in sorted(lines))]


def _unseen(runs: Sequence[Run], key: str) -> tuple[bool, list[str]]:
    """Describe a sample that is in no batch: it may come later, or may not exist."""
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


# -- timeline -------------------------------------------------------------------------------------------------------


def chrome_events(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Yield events in Chrome's trace format: a process for each rank, a line for the trainer and one for each worker.

    The stages of a batch alternate sample by sample; they are drawn one after the other, each with its total time.
    """
    base = min((run for run in runs if run.batches), key=lambda run: run.clock + _first(run))
    for number, run in enumerate(runs):
        # Subtract before adding: floats of the time of day do not resolve microseconds.
        yield from _events_of(run, number, (run.clock - base.clock) - _first(base))


def _events_of(run: Run, number: int, shift: float) -> Iterator[dict[str, Any]]:
    def named(kind: str, line: int, name: str) -> dict[str, Any]:
        return {"name": kind, "ph": "M", "pid": number, "tid": line, "args": {"name": name}}

    def box(name: str, line: int, began: float, ended: float, details: dict[str, Any] | None = None) -> dict[str, Any]:
        times = {"ts": 1e6 * (began + shift), "dur": 1e6 * (ended - began)}
        return {"name": name, "ph": "X", "pid": number, "tid": line} | times | ({"args": details} if details else {})

    yield named("process_name", 0, f"rank {run.rank}")
    yield named("thread_name", 0, "trainer")
    for before, after in pairwise(run.batches):
        yield box("step", 0, before["delivered"], after["asked"])
    lines: dict[str, int] = {}
    for batch in run.batches:
        title = f"step {batch['step']}"
        details = {"pass": batch["pass"], "keys": batch["keys"]}
        yield box(f"wait for {title}", 0, batch["asked"], batch["delivered"], details)
        if "began" not in batch:
            continue
        worker = " ".join(map(str, batch.get("worker", ())))
        if worker not in lines:
            lines[worker] = len(lines) + 1
            yield named("thread_name", lines[worker], f"worker {worker}")
        line, at = lines[worker], batch["began"]
        yield box(title, line, at, batch["ended"], details)
        for stage in _STAGES[:-1]:
            if seconds := batch["stages"].get(stage):
                yield box(stage, line, at, at + seconds)
                at += seconds
        if "received" in batch:
            took = batch["stages"].get("transfer", 0.0)
            yield box(f"transfer of {title}", 0, batch["received"] - took, batch["received"])


def _first(run: Run) -> float:
    return float(min(min(batch["asked"], batch.get("began", batch["asked"])) for batch in run.batches))
