"""Linting of a data set: its shards in spans of samples, by all processes and ranks, and keys over the whole."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from energon_lite.extras.inspect.linting.work import Findings, LintWork, Problem, Span, Target
from energon_lite.storage.files.urls import is_remote
from energon_lite.storage.index.index_cache import cache_folder, first_writable, index_places
from energon_lite.storage.index.nv_meta import meta_path
from energon_lite.storage.sharded_job.job import Progress, ShardedJob
from energon_lite.storage.sharded_job.ranks import Ranks
from energon_lite.storage.sharded_job.work import Table

#: Samples in a span: the work that each process repeats, at most, after a kill.
SPAN = 512
#: Largest number of result files, apart from one per shard: large data sets have longer spans.
_MOST_FILES = 1 << 16
#: Number of keys that are compared at a time; more keys are compared in parts, by ranges of their hashes.
_KEYS_AT_ONCE = 1 << 27
#: Seconds of work up to which no helper processes are started, because these import torch.
_ALONE = 4.0


@dataclass
class LintReport:
    """Results of linting a data set.

    Args:
        path: path of the data set.
        shards: number of shards examined.
        samples: number of samples examined.
        skipped: number of these that a hook of the user's skipped.
        excluded: number of samples that ``split.yaml`` excludes, which were not examined.
        problems: problems in the order of shards and samples; duplicate keys come last.
    """

    path: str
    shards: int = 0
    samples: int = 0
    skipped: int = 0
    excluded: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def broken(self) -> list[Problem]:
        """Problems that are more than notes."""
        return [problem for problem in self.problems if not problem.note]

    @property
    def broken_samples(self) -> int:
        """Number of samples with a problem."""
        return len({(problem.shard, problem.key) for problem in self.broken if problem.key})

    @property
    def kinds(self) -> dict[str, int]:
        """Number of problems by kind, the most frequent first."""
        return dict(Counter(problem.kind for problem in self.broken).most_common())


def lint(
    target: Target, *, ranks: Ranks | None = None, workers: int | None = None, progress: Progress | None = None
) -> LintReport:
    """Examine all samples of a data set. After a kill, another call continues the work.

    Args:
        target: the data set, and the options of the examination.
        ranks: processes that work together; None: this process alone.
        workers: processes of this rank; None: one per core.
        progress: called with the number of samples that are done, the total, and a short text.

    Raises:
        FatalSampleError: a package is missing, or a hook of the user's is broken.
        DatasetError: other ranks made no progress in time; there is no folder that can be written.
    """
    ranks = ranks or Ranks()
    path, spans = target.spec.path, spans_of(target)
    work = LintWork(_results_folder(target), target)
    total, done = sum(span.stop - span.start for span in ranks.seen(spans)), 0

    def tick(span: Span, table: Table | None, number: int, of: int) -> None:
        nonlocal done
        done += span.stop - span.start
        if progress:
            progress(done, total, "")

    job = ShardedJob(
        work, spans, ranks=ranks, workers=workers, alone=_ALONE, what="spans of samples", where=path, tick=tick
    )
    try:
        job.run()
    except BaseException:
        if os.path.isdir(work.folder) and not os.listdir(work.folder):
            os.rmdir(work.folder)
        raise
    if ranks.rank:
        samples = sum(job.done[span]["samples"] for span in job.made)
        return LintReport(path, samples=samples)  # of its share; rank 0 has the whole
    report = LintReport(path, len({span.shard for span in spans}))
    for span in spans:
        if span in job.errors:
            error = job.errors[span]
            report.problems.append(Problem(path, span.shard, "", "", "lint", f"{work.name(span)}: {error.what}"))
            continue
        findings = job.read(span)
        report.samples += findings.samples
        report.skipped += findings.skipped
        report.excluded += findings.excluded
        report.problems += findings.problems
    report.problems += _duplicates(target, work, [span for span in spans if span not in job.errors], job)
    if not job.errors:
        work.remove()
    return report


def spans_of(target: Target) -> list[Span]:
    """Return the spans of a data set; a shard without samples has one, too."""
    size = max(SPAN, -(-sum(target.counts.values()) // _MOST_FILES))
    return [
        Span(shard, start, start + size, start + size >= count)
        for shard, count in target.counts.items()
        for start in range(0, max(count, 1), size)
    ]


def _results_folder(target: Target) -> str:
    """Return the folder of results: next to the data, where other ranks see it, or in the user's cache."""
    path = target.spec.path
    name = "energon_lite.lint"
    cached = os.path.splitext(index_places(path)[1])[0] + ".lint"
    if not target.is_folder:
        return os.path.join(cache_folder(), "lint", os.path.basename(cached)) if is_remote(path) else cached

    def made(folder: str) -> str:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "no permission")
        return folder

    return first_writable(path, "what lint finds", [meta_path(path, name), cached], "run lint", made)


def _duplicates(
    target: Target, work: LintWork, spans: Sequence[Span], job: ShardedJob[Span, Findings]
) -> Iterator[Problem]:
    """Yield a problem for each sample whose key an earlier sample has."""
    total = sum(job.done[span]["samples"] for span in spans)
    if not target.has_keys or not total:
        return
    rounds = max(1, -(-total // _KEYS_AT_ONCE))
    for number in range(rounds):
        columns = []
        for owner, span in enumerate(spans):
            keys = job.read(span).keys
            wanted = np.flatnonzero((keys != 0) & (keys % np.uint64(rounds) == number))
            columns.append((keys[wanted], np.full(len(wanted), owner, dtype=np.int32), wanted + span.start))
        hashes, owners, places = map(np.concatenate, zip(*columns, strict=True))
        order = np.argsort(hashes, kind="stable")
        same = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
        both = (np.stack([owners[rows], places[rows]], axis=1).tolist() for rows in (order[same], order[same + 1]))
        pairs = [(tuple(first), tuple(again)) for first, again in zip(*both, strict=True)]
        # Sorted, so that the shards are opened one after the other.
        names = {(owner, place): work.key(spans[owner].shard, place) for owner, place in sorted({*chain(*pairs)})}
        for first, again in pairs:
            if names[first] == names[again]:  # otherwise only the hashes are equal
                shard, other = spans[first[0]].shard, spans[again[0]].shard
                where = "this shard" if shard == other else shard
                what = f"a sample of {where} has the same key"
                yield Problem(target.spec.path, other, names[again], "", "duplicate key", what)
