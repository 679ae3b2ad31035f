"""From addresses to a batch: the heavy, pure part of loading, the same in every process.

A :class:`Job` says which samples make up a micro-batch; :meth:`Pipeline.run` makes it, from nothing but the job, the
files and the user's hooks. No state is kept between jobs, so any worker can run any job at any time, twice if need be.

A sample that is skipped or fails keeps its place. In training the place is refilled by a replacement out of the same
leaf, drawn by a hash of the address and the number of the attempt; in validation it stays empty. Either way the failure
travels with the batch as a :class:`Failure`, so that it is counted when, and only when, the batch is delivered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from types import GeneratorType
from typing import Any

from energon_lite.errors import SampleError, SkipSample
from energon_lite.hooks import (
    Cooker,
    HookContext,
    TaskEncoder,
    failure_tolerances,
    hook_context,
    hooks_of,
    is_overridden,
    own_hooks,
    running_context,
    seeded_hooks,
)
from energon_lite.loading.makers.columns import ColumnBatches, LeafColumns, columns_of, has_default_hooks
from energon_lite.loading.makers.empty_batch import empty_batch
from energon_lite.loading.makers.hook_errors import (
    FATAL,
    failure_of,
    is_out_of_resources,
    out_of_resources,
    returned_nothing,
    undeclared_generator,
)
from energon_lite.loading.makers.outcomes import (
    Address,
    Failure,
    InARow,
    Mark,
    Outcome,
    Rejected,
    Result,
    of_each,
    too_many_failures,
)
from energon_lite.loading.makers.planned_sample import as_planned
from energon_lite.order.hashing import hash_ints
from energon_lite.samples import CrudeSample, SourceInfo
from energon_lite.storage.read.part_columns import PartColumns, fetch_samples
from energon_lite.storage.read.source import AnySource, OpenedSource
from energon_lite.storage.samples.sample_loader import SampleLoader
from energon_lite.worker_config import ErrorHandler

__all__ = ["Address", "Failure", "Job", "Leaf", "Mark", "Outcome", "Pipeline", "Rejected", "Result", "set_restore_key"]

#: Tags that keep the hashes for different purposes apart.
_SAMPLE, _BATCH, _REPLACEMENT = 11, 12, 13


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
    source: AnySource
    loader: SampleLoader
    key: int
    cooker: Cooker | None = None

    @cached_property
    def parts(self) -> frozenset[str] | None:
        """The parts of a sample to be read; None: all."""
        return self.loader.parts

    @cached_property
    def reader(self) -> PartColumns | OpenedSource:
        """Brings the bytes."""
        return self.source if isinstance(self.source, OpenedSource) else PartColumns(self.source, self.parts)


@dataclass(frozen=True)
class Job:
    """One micro-batch to be made.

    Args:
        pass_number: which pass over the data.
        number: tells the micro-batch from all others of the pass; the randomness of the batch hooks comes from it.
        addresses: ``(leaf, index, epoch)`` of its samples, with ``(start, length, is cut)`` behind it where their
            tokens were planned; none: an empty batch is asked for.
        key: the ``__restore_key__`` of the batch.
    """

    pass_number: int
    number: int
    addresses: Sequence[Address]
    key: tuple[Any, ...] = ()


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
        self._own, self.seeded_hooks = own_hooks(encoder), seeded_hooks(encoder)
        self._tolerances = failure_tolerances(encoder)
        self._example: tuple[Any, int] | None = None

    @cached_property
    def _reads_ahead(self) -> bool:
        return any(leaf.source.read_ahead is not None for leaf in self.leaves)

    @cached_property
    def _columns(self) -> ColumnBatches | None:
        """The quick way, if the hooks are the defaults."""
        if not self.batched or not has_default_hooks(self.encoder):
            return None
        plain = [
            LeafColumns.plan(leaf.reader, leaf.loader)
            if leaf.cooker is None and isinstance(leaf.reader, PartColumns)
            else None
            for leaf in self.leaves
        ]
        return ColumnBatches(plain, self.encoder.padding)

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
        by_tokens = len(job.addresses[0]) > 3  # each sample is compared with the plan
        if self._columns is not None and not by_tokens:
            batch = self._columns.batch(job.addresses, job.key)
            if batch is not None:
                return Result(batch, [*columns_of(job.addresses)[0]])
        row = self._in_a_row()
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
                if by_tokens:  # then no place was refilled: there is one outcome for each
                    made_of = zip(job.addresses, result.outcomes, strict=True)
                    result.tokens = sum(address[4] for address, outcome in made_of if isinstance(outcome, int))
                return result
            except Rejected as rejected:
                # The samples were fine each, but none of them gets through.
                lost = of_each(rejected.failure, places)
                result.outcomes = [next(lost) if isinstance(outcome, int) else outcome for outcome in result.outcomes]
                if not self.refill:
                    result.batch = self._empty(job)
                    return result
                attempt += 1
                if (end := row.add(rejected.failure)) is not None:
                    raise end from rejected.__cause__

    def _in_a_row(self) -> InARow:
        return InARow(self.encoder.failure_tolerance, self._tolerances)

    def fetch(self, addresses: Sequence[Address]) -> None:
        """Have the bytes of these samples at hand, where storage is slow: what is missing is requested all at once."""
        if self._reads_ahead:
            leaves = self.leaves
            fetch_samples((leaves[leaf].reader, index) for leaf, index, _ in addresses)

    def sample(self, address: Address, attempt: int = 0) -> Any:
        """The encoded sample at an address, or the piece of it that was planned.

        Args:
            attempt: 0: the sample itself; k: the k-th replacement for it.
        """
        leaf_number, index, epoch = self._replacement(address, attempt)
        leaf = self.leaves[leaf_number]
        length = len(leaf.source)
        context = HookContext(self.seed, _SAMPLE, leaf.key, epoch, index, sample_index=epoch * length + index)
        key = ("sample", leaf_number, *address[1:3], attempt)
        with hook_context(context, seeds=False):
            name, sample = self._sample_of_source(leaf, index, key)
            for hook in self.hooks.sample:
                sample = self._guarded(hook, leaf.name, name, sample, getattr(self.encoder, hook), sample)
        if not self.batched:
            set_restore_key(sample, key)
        if len(address) > 3:
            return self._guarded("plan", leaf.name, f"sample {index}", sample, as_planned, sample, *address[3:])
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
        # Each attempt of the batch as a whole has replacements of its own.
        attempt = first_attempt * max(1, self.encoder.failure_tolerance, *self._tolerances.values())
        row: InARow | None = None
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
                row = row or self._in_a_row()
                if (end := row.add(rejected.failure)) is not None:
                    raise end from rejected.__cause__

    def _batch(self, samples: list[Any], job: Job) -> Any:
        origin = (self.seed, _BATCH, job.pass_number, job.number)
        names = f"{len(samples)} samples"
        with hook_context(HookContext(*origin, batch_index=job.number), seeds=False):
            batch = self._guarded("batch", "*", names, samples, self.encoder.batch, samples)
        # A context of its own for each hook: what one draws must not depend on how much the other drew.
        with hook_context(HookContext(*origin, 1, batch_index=job.number), seeds=False):
            batch = self._guarded("encode_batch", "*", names, batch, self.encoder.encode_batch, batch)
        set_restore_key(batch, job.key)
        return batch

    def _empty(self, job: Job) -> Any:
        """A batch with no samples."""
        if not self.batched:
            return None
        if self._example is None:
            self._example = self._make_example()
        batch = self._empty_like(*self._example, _BATCH, job.pass_number, job.number)
        set_restore_key(batch, job.key)
        return batch

    def _empty_like(self, batch: Any, rows: int, *origin: int) -> Any:
        """What the encoder makes of a batch with so many rows; ``origin`` tells the empty one from others."""
        with hook_context(HookContext(self.seed, *origin, 2), seeds="empty_batch" in self.seeded_hooks):
            return empty_batch(self.encoder, batch, rows)

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
            if stage in self.seeded_hooks and (context := running_context()) is not None:
                context.seed_globals()
            value = step(*arguments)
            if type(value) is GeneratorType:
                raise undeclared_generator(stage)
            if value is None and stage in self._own:
                raise returned_nothing(stage, self._function(stage, arguments))
            return value
        except SkipSample as skip:
            raise Rejected(Failure(leaf, key, stage, str(skip) or "SkipSample", skipped=True)) from None
        except FATAL:
            raise
        except Exception as error:
            if is_out_of_resources(error):
                raise out_of_resources(error, stage, leaf, key) from error
            if self.error_handler is not None:
                self.error_handler(error, subject, _sources_of(subject))
            raise Rejected(failure_of(error, stage, leaf, key)) from error

    def _function(self, hook: str, arguments: Sequence[Any]) -> Callable[..., Any]:
        """The user's function behind a hook that was called with these arguments."""
        is_cooker = hook == "cook_crude_sample" and not is_overridden(self.encoder, hook)
        function: Callable[..., Any] = arguments[1].cook if is_cooker else getattr(self.encoder, hook)
        return function


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


def set_restore_key(value: Any, key: tuple[Any, ...]) -> None:
    if isinstance(value, dict):
        if "__restore_key__" in value:
            value["__restore_key__"] = key
    elif is_dataclass(value) and hasattr(value, "__restore_key__"):
        object.__setattr__(value, "__restore_key__", key)
