"""From addresses to a batch: the heavy, pure part of loading, the same in every process.

A :class:`Job` says which samples make up a micro-batch; :meth:`Pipeline.run` makes it, from nothing but the job, the
files and the user's hooks. No state is kept between jobs, so any worker can run any job at any time, twice if need be.

A sample that is skipped or fails keeps its place. In training the place is refilled by a replacement out of the same
leaf, drawn by a hash of the address and the number of the attempt; in validation it stays empty. Either way the failure
travels with the batch as a :class:`Failure`, so that it is counted when, and only when, the batch is delivered.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from enum import Enum
from functools import cached_property
from types import GeneratorType
from typing import Any

from energon_lite.errors import EnergonLiteError, FatalSampleError, SampleError, SkipSample
from energon_lite.loading.jobs.columns import ColumnBatches, LeafColumns, columns_of, has_default_hooks
from energon_lite.loading.jobs.empty_batch import empty_batch
from energon_lite.order.hashing import hash_ints
from energon_lite.samples import CrudeSample, SourceInfo
from energon_lite.sources.part_columns import PartColumns
from energon_lite.sources.run_reader import fetch_samples
from energon_lite.sources.sample_loader import SampleLoader
from energon_lite.sources.webdataset import WebdatasetSource
from energon_lite.task_encoder import Cooker, HookContext, TaskEncoder, hook_context, hooks_of
from energon_lite.worker_config import ErrorHandler

__all__ = ["Address", "Failure", "Job", "Leaf", "Mark", "Outcome", "Pipeline", "Rejected", "Result", "set_restore_key"]

#: ``(leaf, index, epoch)``; more numbers behind them may say what part of the sample is meant.
Address = tuple[int, ...]

#: Tags that keep the hashes for different purposes apart.
_SAMPLE, _BATCH, _REPLACEMENT = 11, 12, 13

#: Never a sample's fault: these end the iteration at once.
_FATAL = (
    FatalSampleError,
    ImportError,
    NameError,
    RecursionError,
    StopAsyncIteration,
    StopIteration,
    SyntaxError,
    SystemError,
)


@dataclass(frozen=True)
class Leaf:
    """One data set of a blend, ready to be read.

    Args:
        name: what it is called in messages and counts.
        source: where the bytes are.
        loader: how they become a sample.
        key: 64 bits that tell it from all other leaves; the randomness of its samples comes from it.
        cooker: how a crude sample becomes a sample, if it has to.
    """

    name: str
    source: WebdatasetSource
    loader: SampleLoader
    key: int
    cooker: Cooker | None = None

    @cached_property
    def parts(self) -> frozenset[str] | None:
        """The parts of a sample to be read; None: all."""
        return self.loader.parts

    @cached_property
    def reader(self) -> PartColumns:
        """Brings the bytes."""
        return PartColumns(self.source, self.parts)


@dataclass(frozen=True)
class Job:
    """One micro-batch to be made.

    Args:
        pass_number: which pass over the data.
        number: which micro-batch of the pass, counted over all ranks.
        addresses: ``(leaf, index, epoch)`` of its samples; none: an empty batch is asked for.
    """

    pass_number: int
    number: int
    addresses: Sequence[Address]


@dataclass(frozen=True)
class Failure:
    """A sample that was skipped or that failed, and why.

    Args:
        dropped: nothing is wrong with it, but there was no place for it.
        address: ``(leaf, index, epoch)`` of the sample; None: not known.
    """

    leaf: str
    key: str
    stage: str
    reason: str
    skipped: bool
    details: str = ""
    fix: str = ""
    dropped: bool = False
    address: Address | None = None

    def at(self, address: Sequence[int] | None) -> Failure:
        """The same of the sample at an address."""
        return self if address is None else replace(self, address=tuple(address[:3]))


class Mark(Enum):
    """What else may stand between failures."""

    FINE = "a sample that went well so far; it is counted when it is delivered"
    TRUNCATED = "a sample of which only the first tokens are delivered"
    SPLIT = "a sample that is delivered in several pieces"


@dataclass
class Result:
    """A finished job.

    Args:
        batch: what the hooks made.
        outcomes: what happened to its samples, in their order.
        tokens: that were planned for it, if they were.
        trace: how it was made, if that was asked for; see :mod:`energon_lite.loading.jobs.stage_timer`.
    """

    batch: Any
    outcomes: list[Outcome] = field(default_factory=list)
    tokens: int = 0
    trace: dict[str, Any] | None = None


#: What happened to a sample. One that is part of the batch: the number of its leaf; None if that is not known.
Outcome = Failure | Mark | int | None


class Rejected(Exception):
    """A sample (or batch) that will not be part of the result."""

    def __init__(self, failure: Failure):
        self.failure = failure


class Pipeline:
    """Runs jobs.

    Args:
        leaves: the data sets, in the order's numbering.
        encoder: the user's hooks.
        seed: 64 bits; all randomness of the hooks comes from it.
        refill: replace samples that fail (training) or leave their places empty (validation).
        batched: call the batch hooks; else a job is a single sample.
        error_handler: see :class:`~energon_lite.WorkerConfig`.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        encoder: TaskEncoder,
        *,
        seed: int,
        refill: bool,
        batched: bool,
        error_handler: ErrorHandler | None = None,
    ):
        self.leaves = tuple(leaves)
        self.encoder = encoder
        self.seed = seed
        self.refill = refill
        self.batched = batched
        self.error_handler = error_handler
        self.hooks = hooks_of(encoder, packing=False, batched=batched)
        self._example: tuple[Any, int] | None = None

    @cached_property
    def _reads_ahead(self) -> bool:
        return any(leaf.source.run_reader is not None for leaf in self.leaves)

    @cached_property
    def _columns(self) -> ColumnBatches | None:
        """The quick way, if the hooks are the defaults."""
        if not self.batched or not has_default_hooks(self.encoder):
            return None
        plain = [None if leaf.cooker else LeafColumns.plan(leaf.reader, leaf.loader) for leaf in self.leaves]
        return ColumnBatches(plain)

    def run(self, job: Job) -> Result:
        """Make the batch of a job.

        Raises:
            FatalSampleError: a hook asked for the end, or one place failed ``failure_tolerance`` times in a row.
        """
        result = Result(None)
        if not job.addresses:
            result.batch = self._empty(job)
            return result
        self.fetch(job.addresses)
        if self._columns is not None:
            batch = self._columns.batch(job.addresses, _key(job))
            if batch is not None:
                return Result(batch, [*columns_of(job.addresses)[0]])
        tolerance = self.encoder.failure_tolerance
        attempt = 0
        while True:
            places: list[Address] = []
            made = [self._fill_place(address, attempt, result.outcomes, places) for address in job.addresses]
            samples = [sample for sample in made if sample is not _NOTHING]
            if not samples:
                result.batch = self._empty(job)
                return result
            if not self.batched:
                result.batch = samples[0]
                return result
            try:
                result.batch = self._batch(samples, job)
                return result
            except Rejected as rejected:
                # The samples were fine each, but none of them gets through.
                found = iter(places)
                result.outcomes = [
                    rejected.failure.at(next(found)) if isinstance(outcome, int) else outcome
                    for outcome in result.outcomes
                ]
                if not self.refill:
                    result.batch = self._empty(job)
                    return result
                attempt += 1
                if tolerance and attempt >= tolerance:
                    raise too_many_failures(attempt, rejected.failure) from rejected.__cause__

    def fetch(self, addresses: Sequence[Address]) -> None:
        """Have the bytes of these samples at hand, where storage is slow: what is missing is requested all at once."""
        if self._reads_ahead:
            leaves = self.leaves
            fetch_samples((leaves[leaf].source, index, leaves[leaf].parts) for leaf, index, _ in addresses)

    def sample(self, address: Address, attempt: int = 0) -> Any:
        """The encoded sample at an address.

        Args:
            attempt: 0: the sample itself; k: the k-th replacement for it.
        """
        leaf_number, index, epoch = self._replacement(address, attempt)
        leaf = self.leaves[leaf_number]
        length = len(leaf.source)
        context = HookContext(self.seed, _SAMPLE, leaf.key, epoch, index, sample_index=epoch * length + index)
        key = ("sample", leaf_number, *address[1:], attempt)
        with hook_context(context):
            name, sample = self._sample_of_source(leaf, index, key)
            for hook in self.hooks.sample:
                sample = self._guarded(hook, leaf.name, name, sample, getattr(self.encoder, hook), sample)
        if not self.batched:
            set_restore_key(sample, key)
        return sample

    def _replacement(self, address: Address, attempt: int) -> Address:
        """Where the ``attempt``-th replacement for a sample is; 0: the sample itself."""
        leaf_number, index, epoch = address[:3]
        if attempt:
            leaf = self.leaves[leaf_number]
            index = hash_ints(self.seed, _REPLACEMENT, leaf.key, epoch, index, attempt) % len(leaf.source)
        return leaf_number, index, epoch

    def _sample_of_source(self, leaf: Leaf, index: int, restore_key: tuple[Any, ...]) -> tuple[str, Any]:
        """The name of a sample, and the sample before the hooks (but cooked)."""
        raw = self._guarded("read", leaf.name, f"sample {index}", None, leaf.reader.sample, index)
        name = raw.key
        sample = self._guarded("decode", leaf.name, name, raw.source, leaf.loader.load, raw, restore_key)
        if leaf.cooker is not None:
            cook = self.encoder.cook_crude_sample
            sample = self._guarded("cook_crude_sample", leaf.name, name, sample, cook, sample, leaf.cooker)
        return name, sample

    def restore(self, address: Address, attempt: int) -> Any:
        """:meth:`sample` for the user: what is wrong with it is raised as a SampleError."""
        try:
            return self.sample(address, attempt)
        except Rejected as rejected:
            failure = rejected.failure
            raise SampleError(
                f"the sample cannot be made: {failure.stage}: {failure.reason}",
                where=f"data set {failure.leaf}, {failure.key}",
                fix=failure.fix or None,
            ) from rejected.__cause__

    def _fill_place(self, address: Address, first_attempt: int, outcomes: list[Outcome], places: list[Address]) -> Any:
        """The sample for one place of a batch, or a replacement, whose address goes to ``places``; or nothing."""
        tolerance = self.encoder.failure_tolerance
        # Each attempt of the batch as a whole has replacements of its own.
        start = first_attempt * max(1, tolerance)
        attempt = start
        while True:
            try:
                sample = self.sample(address, attempt)
                outcomes.append(address[0])
                places.append(self._replacement(address, attempt) if attempt else address)
                return sample
            except Rejected as rejected:
                outcomes.append(rejected.failure.at(self._replacement(address, attempt)))
                if not self.refill:
                    return _NOTHING
                attempt += 1
                if tolerance and attempt - start >= tolerance:
                    raise too_many_failures(attempt - start, rejected.failure) from rejected.__cause__

    def _batch(self, samples: list[Any], job: Job) -> Any:
        origin = (self.seed, _BATCH, job.pass_number, job.number)
        names = f"{len(samples)} samples"
        with hook_context(HookContext(*origin, batch_index=job.number)):
            batch = self._guarded("batch", "*", names, samples, self.encoder.batch, samples)
        # A context of its own for each hook: what one draws must not depend on how much the other drew.
        with hook_context(HookContext(*origin, 1, batch_index=job.number)):
            batch = self._guarded("encode_batch", "*", names, batch, self.encoder.encode_batch, batch)
        set_restore_key(batch, _key(job))
        return batch

    def _empty(self, job: Job) -> Any:
        """A batch with no samples."""
        if not self.batched:
            return None
        if self._example is None:
            self._example = self._make_example()
        batch = empty_batch(self.encoder, *self._example)
        set_restore_key(batch, _key(job))
        return batch

    def _make_example(self) -> tuple[Any, int]:
        """A batch that shows what batches of this data look like, of the first samples that work; and its size."""
        failure: Failure | None = None
        tried = 0
        for number, leaf in enumerate(self.leaves):
            found: list[Any] = []
            for index in range(len(leaf.source)):
                tried += 1
                try:
                    found.append(self.sample((number, index, 0)))
                except Rejected as rejected:
                    failure = rejected.failure
                if len(found) == 2 or (not found and 0 < self.encoder.failure_tolerance <= tried):
                    break
            if found:
                try:
                    return self._batch(found, Job(0, -1, ())), len(found)
                except Rejected as rejected:
                    failure = rejected.failure
        raise too_many_failures(tried, failure)

    def _guarded(self, stage: str, leaf: str, key: str, subject: Any, step: Callable[..., Any], *arguments: Any) -> Any:
        """Run one step; turn what it raises into a rejection, unless it must end the iteration."""
        try:
            value = step(*arguments)
            if type(value) is GeneratorType:
                raise _undeclared(stage)
            return value
        except SkipSample as skip:
            raise Rejected(Failure(leaf, key, stage, str(skip) or "SkipSample", skipped=True)) from None
        except MemoryError as error:
            raise _out_of_memory(error, stage, leaf, key) from error
        except _FATAL:
            raise
        except Exception as error:
            if self.error_handler is not None:
                self.error_handler(error, subject, _sources_of(subject))
            reason = error.what if isinstance(error, EnergonLiteError) else str(error)
            kind = type(error).__name__
            details = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            fix = (error.fix or "") if isinstance(error, EnergonLiteError) else ""
            failure = Failure(leaf, key, stage, f"{kind}: {reason}" if reason else kind, False, details, fix)
            raise Rejected(failure) from error


def too_many_failures(count: int, failure: Failure | None) -> FatalSampleError:
    """The error that ends an iteration in which nothing works any more."""
    last = "" if failure is None else f"; the last one, in {failure.stage}: {failure.reason}"
    return FatalSampleError(
        f"{count} samples in a row were skipped or failed{last}",
        where=None if failure is None else f"data set {failure.leaf}, {failure.key}",
        fix=(failure.fix if failure is not None and failure.fix else "mend the hook or the data")
        + "; to allow more in a row, raise failure_tolerance of the task encoder (0: any number)",
    )


def _out_of_memory(error: MemoryError, stage: str, leaf: str, key: str) -> FatalSampleError:
    """Not skipped: which samples are left out must not depend on how much memory a machine has just then."""
    return FatalSampleError(
        f"no memory was left in {stage}: {str(error) or type(error).__name__}",
        where=f"data set {leaf}, {key}",
        fix="if the sample is too large, raise SkipSample for it; else use fewer workers or smaller batches",
    )


def _undeclared(stage: str) -> FatalSampleError:
    return FatalSampleError(
        f"{stage} returned a generator, but is no generator function",
        fix="write it with `yield`, so that the loader knows that it gives any number of results",
    )


class _Nothing:
    """Stands for a place that stays empty (a hook may return None, so None will not do)."""


_NOTHING = _Nothing()


def _sources_of(subject: Any) -> tuple[SourceInfo, ...] | None:
    if isinstance(subject, SourceInfo):
        return (subject,)
    if isinstance(subject, CrudeSample):
        return subject.get("__sources__")
    if isinstance(subject, list):
        return tuple(source for sample in subject for source in _sources_of(sample) or ()) or None
    return getattr(subject, "__sources__", None)


def _key(job: Job) -> tuple[Any, ...]:
    return ("batch", job.pass_number, job.number)


def set_restore_key(value: Any, key: tuple[Any, ...]) -> None:
    if isinstance(value, dict):
        if "__restore_key__" in value:
            value["__restore_key__"] = key
    elif is_dataclass(value) and hasattr(value, "__restore_key__"):
        object.__setattr__(value, "__restore_key__", key)
