"""Measure the samples of a prepared data set: run something over all of them, store a length and a flag for each.

The work is cut into chunks of 256 samples. Each rank takes every ``world_size``-th of them, and the workers of the
loader run them, since it is the user's hooks that are run. What they find goes into a file for each chunk. When all
chunks are known, rank 0 writes the columns. Values of unchanged shards are taken from the columns that are there.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError
from energon_lite.hooks import failure_tolerances
from energon_lite.loading.executors.executor import Executor, InlineExecutor
from energon_lite.loading.executors.worker_pool import WorkerPool
from energon_lite.loading.makers.outcomes import Failure, InARow
from energon_lite.loading.makers.pipeline import Job
from energon_lite.loading.measuring.chunks import Chunk, ChunkKind, Measured, chunks_of
from energon_lite.loading.measuring.pipeline import MeasuringPipeline
from energon_lite.loading.measuring.report import Maker, MeasureReport
from energon_lite.storage.index.column_file import ColumnFile, write_column_file
from energon_lite.storage.index.columns import (
    FAILED,
    LENGTH,
    SKIP,
    column_path,
    stored_columns,
    writable_folder,
)
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.sharded_job.helpers import Outcome
from energon_lite.storage.sharded_job.job import Progress, ShardedJob
from energon_lite.storage.sharded_job.ranks import Ranks
from energon_lite.storage.sharded_job.result_files import ResultFiles, Table

__all__ = ["measure"]

#: Different reasons that are counted one by one.
_MAX_REASONS = 1000
_SHOWN_FAILURES = 20

Block = tuple[NDArray[Any], NDArray[Any]]


def measure(
    pipeline: MeasuringPipeline,
    maker: Maker,
    *,
    shards: Sequence[str] | None = None,
    name: str = "",
    flags: bool = True,
    ranks: Ranks | None = None,
    workers: int | None = None,
    again: bool = False,
    progress: Progress | None = None,
) -> MeasureReport:
    """Measure a data set, and store columns.

    Args:
        pipeline: of one leaf whose source is the whole data set: all shards, in the order of the index, nothing left
            out.
        maker: what says by what the columns are made.
        shards: measure these; None: all. Of the others, what is known is kept.
        name: put before the columns' names, with a dot, so that several measurings stand side by side.
        flags: also write the column ``skip``.
        ranks: the processes that do this together, on one folder; None: this process alone.
        workers: processes of this rank; None: one per core; 0: none, all is done here.
        again: measure also what is known.
        progress: called with the number of samples that are done, of all, and a few words.

    Raises:
        FatalSampleError: ``failure_tolerance`` samples in a row failed, or a sample has no length.
        WorkerError: workers died.
        UsageError: a column of another maker, in a folder that cannot be written, would go before these.
        DatasetError: other ranks made no progress in time; the data set's folders cannot be written.
    """
    run = _Run(pipeline, maker, shards, name, flags, ranks or Ranks(), workers, again, progress)
    # Those with failed samples are tried again.
    run.job.do_share(again=lambda table: bool(table.get("failed")))
    if run.job.ranks.rank:
        return MeasureReport(run.source.path, len(run.rows), sum(chunk.stop - chunk.start for chunk in run.job.made))
    run.job.gather()
    return run.finish()


class _Run:
    """One measuring of one data set by one rank."""

    def __init__(
        self,
        pipeline: MeasuringPipeline,
        maker: Maker,
        shards: Sequence[str] | None,
        name: str,
        flags: bool,
        ranks: Ranks,
        workers: int | None,
        again: bool,
        progress: Progress | None,
    ):
        self.pipeline, self.maker, self._workers = pipeline, maker, ranks.workers(workers)
        source = pipeline.leaves[0].source
        assert isinstance(source, WebdatasetSource)  # as open_whole gives it
        self.source, self.index = source, source.index
        prefix = f"{name}." if name else ""
        self._folder = writable_folder(self.source.path)
        self._names = [prefix + SKIP, prefix + LENGTH] if flags else [prefix + LENGTH]
        self._paths = [column_path(self._folder, one) for one in self._names]
        wanted = self.index.shard_names if shards is None else shards
        numbers = {shard: row for row, shard in enumerate(self.index.shard_names)}
        self.rows = sorted(numbers[shard] for shard in set(wanted))
        chunks = chunks_of(self.index, self.rows)
        self._check_not_hidden()
        self._old = {} if again else self._old_values()
        self.job = ShardedJob(
            ResultFiles(os.path.join(self._folder, f"{prefix}{LENGTH}.results"), ChunkKind(self.index, maker)),
            chunks,
            self._measure,
            ranks=ranks,
            known=self._known_chunks(chunks),
            what="chunks of samples",
            where=self.source.path,
            tick=_Samples(ranks.share(chunks) if ranks.rank else chunks, progress) if progress else None,
        )
        encoder = pipeline.encoder
        self._in_a_row = InARow(encoder.failure_tolerance, failure_tolerances(encoder))

    def _check_not_hidden(self) -> None:
        """Columns beside the data go before those in the user's cache, so none of another maker may stand there."""
        for name in self._names:
            for file in stored_columns(self.source.path, name):
                if os.path.dirname(file.path) == self._folder:
                    break
                if file.fits(self.index) and not self._is_ours(file):
                    raise UsageError(
                        f"the data set has a column {name!r} already, made by something else, and its folder cannot be "
                        "written; what is measured now would stand behind it",
                        where=file.path,
                        fix="store it under another name: --name mine",
                    )

    # -- what is known ----------------------------------------------------------------------------------------------

    def _old_values(self) -> dict[int, Block]:
        """Lengths and flags of unchanged shards, by row, from the columns that are there."""
        found: list[dict[int, NDArray[Any]]] = []
        for name in self._names:
            made = [file for file in stored_columns(self.source.path, name) if self._is_ours(file)]
            found.append(made[0].unchanged(self.index) if made else {})
        flags, lengths = found[0], found[-1]
        if len(self._names) == 1:
            flags = {row: np.zeros(len(values), dtype=np.uint8) for row, values in lengths.items()}
        return {row: (lengths[row], flags[row]) for row in lengths.keys() & flags.keys()}

    def _is_ours(self, file: ColumnFile) -> bool:
        return self.maker.made(file.maker, file.code)

    def _known_chunks(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Chunks that need not be measured because the columns know them; those with failed samples are tried again."""
        bounds = self.index.shards[:, 3].tolist()
        known = []
        for chunk in chunks:
            if chunk.row in self._old:
                flags = self._old[chunk.row][1][chunk.start - bounds[chunk.row] : chunk.stop - bounds[chunk.row]]
                if not (flags == FAILED).any():
                    known.append(chunk)
        return known

    # -- measuring --------------------------------------------------------------------------------------------------

    def _measure(self, chunks: Sequence[Chunk]) -> Generator[tuple[Chunk, Outcome], None, None]:
        """Measure chunks by the workers of the loader."""
        workers, files = min(self._workers, len(chunks)), self.job.files
        earlier = files.find(chunks)
        executor: Executor = WorkerPool(self.pipeline, workers) if workers else InlineExecutor(self.pipeline)
        with closing(executor):
            jobs = (Job(0, one.start, [(0, sample, 0) for sample in range(one.start, one.stop)]) for one in chunks)
            for chunk, result in zip(chunks, executor.results(jobs, ahead=4 * workers), strict=True):
                lengths, flags = result.batch
                failures = [failure for failure in result.outcomes if isinstance(failure, Failure)]
                reasons = [[failure.stage, failure.reason, failure.skipped, failure.key] for failure in failures]
                table = earlier.get(chunk)
                # Of all attempts that with the fewest failures counts.
                if table is None or np.count_nonzero(flags == FAILED) <= table["failed"]:
                    table = files.write(chunk, files.kind.inputs(chunk), Measured(lengths, flags, reasons))
                yield chunk, table
                self._check_failures(flags, failures)

    def _check_failures(self, flags: NDArray[np.uint8], failures: Sequence[Failure]) -> None:
        """End the measuring if nothing works any more. Skips do not count: to find them is what it is for."""
        failed = iter([failure for failure in failures if not failure.skipped])
        for flag in flags.tolist():
            if flag != FAILED:
                self._in_a_row.fine()
            elif (end := self._in_a_row.add(next(failed))) is not None:
                raise end

    # -- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> MeasureReport:
        """Write the columns."""
        report, largest = self._sum_up()
        report.written = tuple(self._paths)
        if self._up_to_date():
            return report
        types = {LENGTH: "<i4" if largest < 2**31 else "<i8", SKIP: "|u1"}
        # The lengths last: a run that is killed between the two is not done, and finds its results.
        for path, name in zip(self._paths, self._names, strict=True):
            kind = name.rpartition(".")[2]
            write_column_file(
                path,
                name,
                self.index,
                (None if block is None else block[kind == SKIP] for block in self._blocks()),
                dtype=types[kind],
                maker=self.maker.settings,
                code=self.maker.code,
                command=self.maker.command,
            )
        self.job.files.remove()
        return report

    def _up_to_date(self) -> bool:
        if any(self.job.done.values()):
            return False
        present = [ColumnFile(path) if os.path.exists(path) else None for path in self._paths]
        return all(
            file is not None and file.fits(self.index) and self._is_ours(file) and file.code == self.maker.code
            for file in present
        )

    def _blocks(self, visit: Callable[[int, Measured], None] | None = None) -> Iterator[Block | None]:
        """Lengths and flags of each shard of the index; ``visit`` sees the results that are used, by shard."""
        wanted, bounds = set(self.rows), self.index.shards[:, 3].tolist()
        measured: dict[int, list[Chunk]] = defaultdict(list)
        for chunk in self.job.units:
            if self.job.done[chunk]:
                measured[chunk.row].append(chunk)
        for row in range(len(self.index.shard_names)):
            old = self._old.get(row)
            if row not in wanted or (old is not None and row not in measured):
                yield old
                continue
            samples = bounds[row + 1] - bounds[row]
            lengths, flags = np.zeros(samples, dtype=np.int64), np.zeros(samples, dtype=np.uint8)
            if old is not None:
                lengths[:], flags[:] = old
            for chunk in measured[row]:
                found = self.job.read(chunk)
                place = slice(chunk.start - bounds[row], chunk.stop - bounds[row])
                lengths[place], flags[place] = found.lengths, found.flags
                if visit:
                    visit(row, found)
            yield lengths, flags

    def _sum_up(self) -> tuple[MeasureReport, int]:
        """The report, and the largest length of all, also of shards that were not asked for now."""
        report = MeasureReport(self.source.path, len(self.rows))
        report.known = sum(chunk.stop - chunk.start for chunk, table in self.job.done.items() if not table)
        reasons, failures = Counter[tuple[str, str, bool]](), list[str]()

        def visit(row: int, measured: Measured) -> None:
            for stage, reason, skipped, key in measured.reasons:
                crowded = (stage, reason, skipped) not in reasons and len(reasons) >= _MAX_REASONS
                reasons[stage, "(other reasons)" if crowded else reason, skipped] += 1
                if not skipped and len(failures) < _SHOWN_FAILURES:
                    failures.append(f"{self.index.shard_names[row]}, {key}: {stage}: {reason}")

        wanted, largest = set(self.rows), 0
        for row, block in enumerate(self._blocks(visit)):
            if block is not None and len(block[0]):
                largest = max(largest, int(block[0].max()))
                if row in wanted:
                    report.add(*block)
        report.reasons = tuple((count, *reason) for reason, count in reasons.most_common())
        report.failures = tuple(failures)
        return report, largest


class _Samples:
    """Tells progress in samples."""

    def __init__(self, chunks: Sequence[Chunk], progress: Progress):
        self._total, self._progress = sum(chunk.stop - chunk.start for chunk in chunks), progress
        self._done = 0

    def __call__(self, chunk: Chunk, table: Table | None) -> None:
        self._done += chunk.stop - chunk.start
        self._progress(self._done, self._total, "")
