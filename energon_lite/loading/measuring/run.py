"""Measure the samples of a prepared data set: run something over all of them, store a length and a flag for each.

The work is cut into chunks of 256 samples. Each rank takes every ``world_size``-th of them, its workers run them, and
what they find goes into a journal at once; so a run that was killed goes on where it was. When all chunks are known,
rank 0 writes the columns. Values of unchanged shards are taken from the columns that are there.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import DatasetError, UsageError
from energon_lite.hooks import failure_tolerances
from energon_lite.loading.executors.executor import Executor, InlineExecutor
from energon_lite.loading.executors.worker_pool import WorkerPool
from energon_lite.loading.makers.outcomes import Failure, InARow, Result
from energon_lite.loading.makers.pipeline import Job
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
from energon_lite.storage.index.measure_journal import (
    CHUNK,
    Chunks,
    JournalReader,
    JournalWriter,
    Measured,
    remove_journals,
)
from energon_lite.storage.prepare.ranks import Ranks
from energon_lite.storage.read.webdataset import WebdatasetSource

__all__ = ["measure"]

#: Seconds between two looks for the journals of other ranks.
_LOOK = 0.2
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
    progress: Callable[[int], None] | None = None,
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
        progress: called with a number of samples that are done.

    Raises:
        FatalSampleError: ``failure_tolerance`` samples in a row failed, or a sample has no length.
        WorkerError: workers died.
        UsageError: a column of another maker, in a folder that cannot be written, would go before these.
        DatasetError: other ranks made no progress in time; the data set's folders cannot be written.
    """
    run = _Run(pipeline, maker, shards, name, flags, ranks or Ranks(), again, progress)
    run.measure_share(_workers(workers, run.ranks))
    if run.ranks.rank:
        return MeasureReport(run.source.path, len(run.rows), run.measured)
    run.wait()
    return run.finish()


def _workers(asked: int | None, ranks: Ranks) -> int:
    if asked is not None:
        return asked
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if ranks.world_size > 1 else 1
    return max(1, (os.cpu_count() or 1) // here)


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
        again: bool,
        progress: Callable[[int], None] | None,
    ):
        self.pipeline, self.maker, self.ranks = pipeline, maker, ranks
        self.leaf = pipeline.leaves[0]
        source = self.leaf.source
        assert isinstance(source, WebdatasetSource)  # as open_whole gives it
        self.source, self.index = source, source.index
        self._progress = progress or (lambda samples: None)
        prefix = f"{name}." if name else ""
        self._folder = writable_folder(self.source.path)
        self._names = [prefix + SKIP, prefix + LENGTH] if flags else [prefix + LENGTH]
        self._paths = [column_path(self._folder, one) for one in self._names]
        self._journals = os.path.join(self._folder, f"{prefix}{LENGTH}.journals")
        self.chunks = Chunks(self.index)
        wanted = self.index.shard_names if shards is None else shards
        numbers = {shard: row for row, shard in enumerate(self.index.shard_names)}
        self.rows = sorted(numbers[shard] for shard in set(wanted))
        self._wanted = np.zeros(len(self.chunks), dtype=bool)
        for row in self.rows:
            self._wanted[self.chunks.first[row] : self.chunks.first[row + 1]] = True
        self._old = {} if again else self._old_values()
        self._reader = JournalReader(self._journals, self.chunks, self._made_so)
        self._reader.look()
        self._from_columns = self._chunks_of_old_values()
        self.measured = 0
        encoder = pipeline.encoder
        self._in_a_row = InARow(encoder.failure_tolerance, failure_tolerances(encoder))

        self._check_not_hidden()

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

    def _made_so(self, record: Mapping[str, Any]) -> bool:
        return self.maker.made(record["settings"], record["code"])

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

    def _chunks_of_old_values(self) -> NDArray[np.bool_]:
        """Chunks that need not be measured because the columns know them; those with failed samples are tried again."""
        known = np.zeros(len(self.chunks), dtype=bool)
        for row, (_, flags) in self._old.items():
            first, stop = self.chunks.first[row : row + 2].tolist()
            known[first:stop] = True
            failed = np.flatnonzero(flags == FAILED)
            known[first + failed // CHUNK] = False
        return known

    # -- measuring --------------------------------------------------------------------------------------------------

    def measure_share(self, workers: int) -> None:
        """Measure this rank's chunks, as far as they are unknown."""
        mine = np.zeros(len(self.chunks), dtype=bool)
        mine[self.ranks.rank :: self.ranks.world_size] = True
        mine &= self._wanted
        known = self._from_columns | (self._reader.known & (self._reader.failed == 0))
        self._tell(mine & known)
        todo = np.flatnonzero(mine & ~known)
        if not len(todo):
            return
        settings = {"settings": dict(self.maker.settings), "code": self.maker.code}
        with (
            closing(JournalWriter(self._journals, self.ranks.rank, settings)) as journal,
            closing(self._executor(min(workers, len(todo)))) as executor,
        ):
            for number, result in _in_order(executor, self._jobs(todo), ahead=4 * max(1, workers)):
                self._take(journal, number, result)

    def _executor(self, workers: int) -> Executor:
        return WorkerPool(self.pipeline, workers) if workers else InlineExecutor(self.pipeline)

    def _jobs(self, numbers: NDArray[np.int64]) -> Iterator[Job]:
        for number in map(int, numbers):
            chunk = self.chunks[number]
            yield Job(0, number, [(0, sample, 0) for sample in range(chunk.start, chunk.stop)])

    def _take(self, journal: JournalWriter, number: int, result: Result) -> None:
        lengths, flags = result.batch
        failures = [failure for failure in result.outcomes if isinstance(failure, Failure)]
        reasons = [[failure.stage, failure.reason, failure.skipped, failure.key] for failure in failures]
        journal.append(self.chunks, self.chunks[number], Measured(lengths, flags, reasons))
        self.measured += len(lengths)
        self._progress(len(lengths))
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

    def wait(self) -> None:
        """Wait until all ranks have done their shares.

        Raises:
            DatasetError: they made no progress for too long.
        """
        self._reader.look()
        last = time.monotonic()
        missing = self._missing()
        self._tell(self._wanted & ~missing & ~self._share(self.ranks.rank))
        while missing.any():
            if time.monotonic() - last > self.ranks.timeout:
                raise self._too_slow(missing)
            time.sleep(_LOOK)
            new = self._reader.look()
            if new:
                last = time.monotonic()
                self._progress(new)
                missing = self._missing()

    def _missing(self) -> NDArray[np.bool_]:
        missing: NDArray[np.bool_] = self._wanted & ~self._reader.known & ~self._from_columns
        return missing

    def _share(self, rank: int) -> NDArray[np.bool_]:
        share = np.zeros(len(self.chunks), dtype=bool)
        share[rank :: self.ranks.world_size] = True
        return share

    def _too_slow(self, missing: NDArray[np.bool_]) -> DatasetError:
        counts = {rank: int((missing & self._share(rank)).sum()) for rank in range(self.ranks.world_size)}
        texts = [f"rank {rank}: {count}" for rank, count in counts.items() if count]
        return DatasetError(
            f"{int(missing.sum())} chunks of samples are not measured after {self.ranks.timeout:g} s without progress "
            f"({'; '.join(texts)})",
            where=self.source.path,
            fix="see why these ranks are slow or gone, or if they see this folder; run again, what is done is kept",
        )

    def finish(self) -> MeasureReport:
        """Write the columns."""
        report, largest = self._sum_up()
        report.written = tuple(self._paths)
        if self._up_to_date():
            return report
        types = {LENGTH: "<i4" if largest < 2**31 else "<i8", SKIP: "|u1"}
        # The lengths last: a run that is killed between the two is not done, and finds its journals.
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
        remove_journals(self._journals)
        return report

    def _up_to_date(self) -> bool:
        if self._reader.known.any():
            return False
        present = [ColumnFile.open(path) if os.path.exists(path) else None for path in self._paths]
        return all(
            file is not None and file.fits(self.index) and self._is_ours(file) and file.code == self.maker.code
            for file in present
        )

    def _blocks(self, visit: Callable[[int, Measured], None] | None = None) -> Iterator[Block | None]:
        """Lengths and flags of each shard of the index; ``visit`` sees the records that are used, by shard."""
        wanted = set(self.rows)
        for row in range(len(self.index.shard_names)):
            old = self._old.get(row)
            if row not in wanted:
                yield old
                continue
            samples = int(self.chunks.identities[row, 3])
            lengths, flags = np.zeros(samples, dtype=np.int64), np.zeros(samples, dtype=np.uint8)
            if old is not None:
                lengths[:], flags[:] = old
            begin = int(self.index.shards[row, 3])
            for number in self._recorded(row):
                chunk, found = self.chunks[number], self._reader.read(number)
                place = slice(chunk.start - begin, chunk.stop - begin)
                lengths[place], flags[place] = found.lengths, found.flags
                if visit:
                    visit(row, found)
            yield lengths, flags

    def _recorded(self, row: int) -> list[int]:
        first, stop = self.chunks.first[row : row + 2].tolist()
        return (first + np.flatnonzero(self._reader.known[first:stop])).tolist()

    def _sum_up(self) -> tuple[MeasureReport, int]:
        """The report, and the largest length of all, also of shards that were not asked for now."""
        report = MeasureReport(self.source.path, len(self.rows))
        report.known = int(self.chunks.sizes[self._from_columns & self._wanted].sum())
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

    def _tell(self, chunks: NDArray[np.bool_]) -> None:
        samples = int(self.chunks.sizes[chunks].sum())
        if samples:
            self._progress(samples)


def _in_order(executor: Executor, jobs: Iterator[Job], ahead: int) -> Iterator[tuple[int, Result]]:
    """Run jobs, some of them ahead; their results in the order of the jobs."""
    running: deque[tuple[int, int]] = deque()
    for job in islice(jobs, ahead):
        running.append((job.number, executor.submit(job)))
    while running:
        number, ticket = running.popleft()
        result = executor.result(ticket)
        following = next(jobs, None)
        if following is not None:
            running.append((following.number, executor.submit(following)))
        yield number, result
