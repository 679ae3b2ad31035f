"""Measuring of a prepared data set: run a runner over all samples, and store a length and a flag for each.

The work is cut into chunks of 256 samples. Each rank takes every ``world_size``-th chunk, and the workers of the loader
run it, because the user's hooks are involved. The results of each chunk go into a file. When all chunks are done, rank
0 writes the columns. Values of unchanged shards are taken from the existing columns.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.hooks import failure_tolerances
from energon_lite.loading.executors.executor import Executor, InlineExecutor
from energon_lite.loading.executors.worker_pool import WorkerPool
from energon_lite.loading.makers.batch_runner import Job
from energon_lite.loading.makers.outcomes import Failure, FailureStreak, Reasons
from energon_lite.loading.measured_columns import Maker, MeasuredColumns, MeasureReport
from energon_lite.loading.measuring_runner import MeasuringRunner, Shapes, Values, joined_shapes
from energon_lite.storage.index.column_file import LENGTH, Ragged, shard_table
from energon_lite.storage.index.columns import FAILED
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.sharded_job import Progress, Ranks, ShardedJob
from energon_lite.storage.sharded_work import Arrays, Outcome, Table, Work

#: Largest number of failed samples in the report.
_SHOWN_FAILURES = 20
#: Samples in a chunk: the work that each worker loses, at most, when a run is killed.
CHUNK = 256
#: Largest number of result files of a measuring, apart from a few per shard: large data sets have larger chunks.
_MOST_FILES = 1 << 16
#: Version of the format of the results.
_FORMAT = 2


@dataclass(frozen=True)
class Chunk:
    """Neighbouring samples of a shard, from ``start`` to ``stop``, counted over the whole data set."""

    row: int
    start: int
    stop: int


def chunks_of(index: PackedIndex, rows: Sequence[int], least: int | None = None) -> list[Chunk]:
    """Return the chunks of some shards of an index, of at least ``least`` samples (256). No chunk crosses shards.

    Example:
        >>> chunks_of(index, [0, 1])            # of two shards with 300 and 10 samples
        [Chunk(row=0, start=0, stop=256), Chunk(row=0, start=256, stop=300), Chunk(row=1, start=300, stop=310)]
    """
    size = max(CHUNK if least is None else least, -(-len(index) // _MOST_FILES))
    bounds = index.shards[:, 3].tolist()
    return [
        Chunk(row, start, min(start + size, bounds[row + 1]))
        for row in rows
        for start in range(bounds[row], bounds[row + 1], size)
    ]


@dataclass
class Measured:
    """Results of measuring a chunk.

    Args:
        values: values of its samples.
        reasons: ``[stage, reason, skipped, key]`` of each sample that was skipped or failed.
    """

    values: Values
    reasons: list[list[Any]] = field(default_factory=list)


class ChunkWork(Work[Chunk, Measured]):
    """Measuring of chunks of a data set by one maker, in the workers of the loader. Tables have the number of failed
    samples."""

    def __init__(self, folder: str, index: PackedIndex, maker: Maker):
        super().__init__(folder)
        self._maker = maker
        self._shards = index.shard_names
        self._identities = shard_table(index)[:, :4].tolist()
        self._bounds = index.shards[:, 3].tolist()

    def name(self, unit: Chunk) -> str:
        first = self._bounds[unit.row]
        return f"{self._shards[unit.row]}[{unit.start - first}:{unit.stop - first}]"

    def inputs(self, unit: Chunk) -> list[Any]:
        return [dict(self._maker.settings), self._maker.code, self._identities[unit.row], _FORMAT]

    def belongs(self, unit: Chunk, inputs: list[Any]) -> bool:
        return self._maker.made(inputs[0], inputs[1]) and bool(inputs[2:] == [self._identities[unit.row], _FORMAT])

    def pack(self, result: Measured) -> tuple[dict[str, Any], Arrays]:
        values = result.values
        reasons = np.frombuffer(json.dumps(result.reasons).encode(), dtype=np.uint8)
        arrays = {"flags": values.flags, "reasons": reasons}
        for name, column in values.columns.items():
            if isinstance(column, Ragged):
                arrays |= {f"counts {name}": column.counts, f"values {name}": column.values}
            else:
                arrays[f"column {name}"] = column
        return {"failed": int((values.flags == FAILED).sum()), "shapes": values.shapes()}, arrays

    def unpack(self, table: Table, arrays: Arrays) -> Measured:
        values = Values(arrays["flags"])
        for name, width in table["shapes"].items():
            if width:
                values.columns[name] = Ragged(arrays[f"counts {name}"], arrays[f"values {name}"])
            else:
                values.columns[name] = arrays[f"column {name}"]
        return Measured(values, json.loads(arrays["reasons"].tobytes()))


def measure(
    runner: MeasuringRunner,
    maker: Maker,
    *,
    shards: Sequence[str] | None = None,
    name: str = "",
    flags: bool = True,
    lengths: bool = True,
    ranks: Ranks | None = None,
    workers: int | None = None,
    again: bool = False,
    progress: Progress | None = None,
    together: int | None = None,
) -> MeasureReport:
    """Measure a data set, and store columns.

    Args:
        runner: runner of one leaf whose source is the whole data set: all shards, in the order of the index, with
            all samples.
        maker: maker of the columns.
        shards: names of the shards to be measured; None: all. Known values of other shards are kept.
        name: prefix of the columns' names, before a dot, so that results of several measurings can coexist.
        flags: also write the column ``skip``.
        lengths: also write the column ``length``.
        ranks: processes that measure together, on one folder; None: this process alone.
        workers: processes of this rank; None: one per core; 0: this process does the work.
        again: also measure samples with known values.
        progress: called with the number of samples that are done, the total, and a short text.
        together: samples in a unit of work, if there is little to do for each; None: 256.

    Raises:
        FatalSampleError: ``failure_tolerance`` samples in a row failed, or a sample has no length.
        WorkerError: workers died.
        UsageError: a column of another maker, in a folder that cannot be written, would take precedence over these.
        DatasetError: other ranks made no progress in time; the data set's folders cannot be written.
    """
    ranks = ranks or Ranks()
    source = runner.leaves[0].source
    assert isinstance(source, WebdatasetSource)  # guaranteed by open_whole
    index = source.index
    columns = MeasuredColumns(source, maker, name, flags=flags, lengths=lengths)
    wanted = index.shard_names if shards is None else shards
    rows = sorted(index.shard_rows[shard] for shard in set(wanted))
    chunks = chunks_of(index, rows, together)
    known = {} if again else columns.known()
    work = ChunkWork(columns.results, index, maker)
    job = ShardedJob(
        work,
        chunks,
        ranks=ranks,
        run=partial(_measure, runner, work, ranks.workers(workers)),
        known=_known_chunks(index, chunks, known),
        again=lambda table: bool(table.get("failed")),  # chunks with failed samples are measured again
        what="chunks of samples",
        where=source.path,
        tick=_Samples(ranks.seen(chunks), progress) if progress else None,
    )
    job.run()
    if ranks.rank:
        return MeasureReport(source.path, len(rows), sum(chunk.stop - chunk.start for chunk in job.made))
    blocks = partial(_blocks, index, rows, known, job)
    measured = (table["shapes"] for table in job.done.values() if table)
    least: Shapes = {LENGTH: 0} if lengths else {}
    shapes = joined_shapes([least, *(values.shapes() for values in known.values()), *measured])
    report, largest = _sum_up(source, rows, job, blocks)
    report.written = columns.paths(shapes)
    if any(job.done.values()) or not columns.up_to_date(shapes):
        columns.write(blocks, largest, shapes, {*rows, *known})
        work.remove()
    return report


def _known_chunks(index: PackedIndex, chunks: Sequence[Chunk], known: Mapping[int, Values]) -> list[Chunk]:
    """Return chunks whose values are known; chunks with failed samples are measured again."""
    bounds = index.shards[:, 3].tolist()
    return [
        chunk
        for chunk in chunks
        if chunk.row in known
        and FAILED not in known[chunk.row].flags[chunk.start - bounds[chunk.row] : chunk.stop - bounds[chunk.row]]
    ]


def _measure(
    runner: MeasuringRunner, work: ChunkWork, workers: int, chunks: Sequence[Chunk]
) -> Generator[tuple[Chunk, Outcome], None, None]:
    """Measure chunks in the workers of the loader."""
    workers = min(workers, len(chunks))
    earlier = work.find(chunks)
    in_a_row = FailureStreak(runner.encoder.failure_tolerance, failure_tolerances(runner.encoder))
    executor: Executor = WorkerPool(runner, workers) if workers else InlineExecutor(runner)
    with closing(executor):
        jobs = (Job(0, chunk.start, [(0, sample, 0) for sample in range(chunk.start, chunk.stop)]) for chunk in chunks)
        for chunk, result in zip(chunks, executor.results(jobs, ahead=4 * workers), strict=True):
            values = result.batch
            flags = result.batch.flags
            failures = [failure for failure in result.outcomes if isinstance(failure, Failure)]
            reasons = [[failure.stage, failure.reason, failure.skipped, failure.key] for failure in failures]
            table = earlier.get(chunk)
            # Of several attempts, the one with the fewest failures is kept.
            if table is None or np.count_nonzero(flags == FAILED) <= table["failed"]:
                table = work.write(chunk, work.inputs(chunk), Measured(values, reasons))
            yield chunk, table
            _check_failures(in_a_row, flags, failures)


def _check_failures(in_a_row: FailureStreak, flags: NDArray[np.uint8], failures: Sequence[Failure]) -> None:
    """End the measuring after too many failures in a row. Skips do not count, because they are to be measured."""
    failed = iter([failure for failure in failures if not failure.skipped])
    for flag in flags.tolist():
        if flag != FAILED:
            in_a_row.reset()
        elif (end := in_a_row.add(next(failed))) is not None:
            raise end


def _blocks(
    index: PackedIndex,
    rows: Sequence[int],
    known: Mapping[int, Values],
    job: ShardedJob[Chunk, Measured],
    visit: Callable[[int, Measured], None] = lambda row, measured: None,
) -> Iterator[Values | None]:
    """Yield the known values of each shard of the index; ``visit`` is called with the results used, by shard."""
    wanted = set(rows)
    bounds = index.shards[:, 3].tolist()
    measured: dict[int, list[Chunk]] = defaultdict(list)
    for chunk in job.units:
        if job.done[chunk]:
            measured[chunk.row].append(chunk)
    for row in range(len(index.shard_names)):
        old = known.get(row)
        if row not in wanted or (old is not None and row not in measured):
            yield old
            continue
        parts = []
        for chunk in measured[row]:
            result = job.read(chunk)
            parts.append((chunk.start - bounds[row], result.values))
            visit(row, result)
        yield (Values.zeros(bounds[row + 1] - bounds[row]) if old is None else old).replaced(parts)


def _sum_up(
    source: WebdatasetSource,
    rows: Sequence[int],
    job: ShardedJob[Chunk, Measured],
    blocks: Callable[..., Iterator[Values | None]],
) -> tuple[MeasureReport, dict[str, int]]:
    """Return the report, and the largest value of each column, including shards that were not requested now."""
    report = MeasureReport(source.path, len(rows))
    report.known = sum(chunk.stop - chunk.start for chunk, table in job.done.items() if not table)
    reasons = Reasons()
    failures = list[str]()

    def visit(row: int, measured: Measured) -> None:
        for stage, reason, skipped, key in measured.reasons:
            reasons.add(key, stage, reason, skipped)
            if not skipped and len(failures) < _SHOWN_FAILURES:
                failures.append(f"{source.index.shard_names[row]}, {key}: {stage}: {reason}")

    wanted = set(rows)
    every = MeasureReport(source.path)
    longest = 0
    for row, block in enumerate(blocks(visit)):
        if block is not None and len(block.flags):
            longest = max(longest, int(block.column(LENGTH).max()))  # type: ignore[union-attr]
            every.add(block)
            if row in wanted:
                report.add(block)
    counted_reasons = reasons.most_common()
    report.reasons = tuple((count, kind[0], reasons.text(*kind), kind[2]) for kind, count in counted_reasons)
    report.failures = tuple(failures)
    return report, {LENGTH: longest} | {name: largest for name, (_, _, largest) in every.columns.items()}


class _Samples:
    """Progress in samples."""

    def __init__(self, chunks: Sequence[Chunk], progress: Progress):
        self._total = sum(chunk.stop - chunk.start for chunk in chunks)
        self._progress = progress
        self._done = 0

    def __call__(self, chunk: Chunk, table: Table | None, done: int, of: int) -> None:
        self._done += chunk.stop - chunk.start
        self._progress(self._done, self._total, "")
