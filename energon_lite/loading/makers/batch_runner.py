"""From addresses to a batch: the expensive, pure part of loading, the same in every process.

A :class:`Job` lists the samples of a micro-batch; :meth:`BatchRunner.run` makes the micro-batch from the job, the files
and the user's hooks alone. No state is kept between jobs, so any worker can run any job at any time, even twice.

A sample that is skipped or fails keeps its place. In training, a replacement from the same leaf takes its place, drawn
by a hash of the address and the number of the attempt; in validation, the place stays empty. In both cases the failure
is returned with the batch as a :class:`Failure`, so that it is counted if, and only if, the batch is delivered.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

from energon_lite.batching.digests import set_digest
from energon_lite.errors import UnlikeError
from energon_lite.hooks import (
    HookContext,
    TaskEncoder,
    always_seeded,
    failure_tolerances,
    hooks_of,
    returns_its_argument,
)
from energon_lite.loading.makers.columns import batch_of_rows, columns_of, has_default_hooks
from energon_lite.loading.makers.hook_steps import UnseededDraw
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.leaf import Leaf, SampleNames
from energon_lite.loading.makers.outcomes import (
    Address,
    Failure,
    FailureStreak,
    Outcome,
    Rejected,
    Result,
    of_each,
    set_restore_key,
    too_many_failures,
)
from energon_lite.order.hashing import HashDomain
from energon_lite.worker_config import ErrorHandler

#: Tag that separates the hashes of this purpose from those of others.
_BATCH = HashDomain.BATCH_HOOKS.value

#: The leaf of an address.
_LEAF_OF = itemgetter(0)


@dataclass(frozen=True)
class Job:
    """Description of one micro-batch to be made.

    Args:
        pass_number: number of the pass over the data.
        number: number that differs for all micro-batches of the pass; it seeds the batch hooks.
        addresses: ``(leaf, index, epoch)`` of its samples, followed by ``(start, length, is cut)`` if their tokens were
            planned; empty: make an empty batch.
        key: the ``__restore_key__`` of the batch.
    """

    pass_number: int
    number: int
    addresses: Sequence[Address]
    key: tuple[Any, ...] = ()


class BatchRunner(JobRunner):
    """Runner of planned jobs.

    Args:
        leaves: the leaves, in the order's numbering.
        encoder: the user's hooks.
        seed: 64-bit seed of all random numbers of the hooks.
        refill: replace samples that fail (training) or leave their places empty (validation).
        batched: call the batch hooks; if False, a job is a single sample.
        error_handler: see :class:`~energon_lite.WorkerConfig`.
        empty: make a batch without samples if none are left; if False, the result has no batch.
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
        empty: bool = True,
    ):
        hooks = hooks_of(encoder, packing=False, batched=batched)
        super().__init__(leaves, encoder, hooks, seed=seed, error_handler=error_handler)
        self.refill = refill
        self.batched = batched
        self.empty = empty
        self._batch_hooks = [name for name in ("batch", "encode_batch") if not returns_its_argument(encoder, name)]
        self._by_fields = batched and has_default_hooks(encoder)
        # Draws of hooks from the global generators. True: there are, or need not be watched for; None: not known yet.
        tried = self.seeded_hooks.intersection(["cook_crude_sample", *hooks.sample, *self._batch_hooks])
        self._draws: bool | None = None if tried and tried.isdisjoint(always_seeded(encoder)) else True
        self._tolerances = failure_tolerances(encoder)
        self._example: tuple[Any, int] | None = None

    def run(self, job: Job) -> Result:
        """Make the batch of a job.

        Raises:
            FatalSampleError: a hook asked to end the run, or one place failed ``failure_tolerance`` times in a row.
        """
        result = Result(None)
        services = self.services
        for observer in services.observers:
            observer.begin()
        # A call of ``self.context()`` would cost too much here.
        with HookContext(cache=services.cache_pool, worker_config=services.worker_config) as context:
            addresses = list(iter(job.addresses))
            places = self._watched(result, job, addresses, context) if addresses else self._empty(result, job, context)
        # If nothing was replaced, the digest is that of the plan, which has already computed it.
        result.digest = set_digest(job.addresses if places is addresses or places == addresses else places)
        if services.observers:
            result.trace = self.end(places)
        return result

    def _watched(
        self, result: Result, job: Job, addresses: Sequence[Address], context: HookContext
    ) -> Sequence[Address]:
        """:meth:`_fill` while the global generators are watched.

        At first, hooks are seeded. If they draw nothing, they are not seeded in the next jobs, unless it turns out that
        they draw: then the batch is made again, and hooks are seeded from then on.
        """
        if self._draws or self.services.store is not None:
            return self._fill(result, job, addresses, context)
        seeds = self._draws is None
        is_alone = context.watch(seeds=seeds)
        with suppress(UnseededDraw):
            places = self._fill(result, job, addresses, context)
            self._draws = context.drew() or (seeds and not is_alone)
            if seeds or not self._draws:
                return places
        context.drew()
        self._draws = True
        result.outcomes = []
        return self._fill(result, job, addresses, context)

    def _fill(self, result: Result, job: Job, addresses: Sequence[Address], context: HookContext) -> Sequence[Address]:
        """Put the batch of a job into its result; return the addresses of its samples."""
        by_tokens = len(addresses[0]) > 3  # each sample is compared with the plan
        together = self._by_fields and not by_tokens and self.services.store is None
        if together and not any(observer.sees_samples for observer in self.services.observers):
            result.batch = self._batch_by_fields(job)
            if result.batch is not None:
                result.outcomes = [*columns_of(job.addresses)[0]]
                return addresses
        row: FailureStreak | None = None
        attempt = 0
        while True:
            samples, places = self._samples(addresses, attempt, result.outcomes, context, job.number)
            if not samples:
                return self._empty(result, job, context)
            if not self.batched:
                result.batch = samples[0]
                return places
            try:
                result.batch = self._batch(samples, places, job, context, attempt)
            except Rejected as rejected:
                # Each of the samples is fine, but the batch of them is lost.
                lost = of_each(rejected.failure, places)
                result.outcomes = [next(lost) if isinstance(outcome, int) else outcome for outcome in result.outcomes]
                if not self.refill:
                    return self._empty(result, job, context)
                attempt += 1
                row = self._counted(rejected, row)
                continue
            if by_tokens:  # so no place was refilled, and there is one outcome for each
                made_of = zip(addresses, result.outcomes, strict=True)
                result.tokens = sum(address[4] for address, outcome in made_of if isinstance(outcome, int))
            return places

    # -- the fast route -------------------------------------------------------------------------------------------

    def _batch_by_fields(self, job: Job) -> Any | None:
        """Return the batch as the default hooks make it; None: its samples have to be made one by one."""
        for leaf in map(self.leaves.__getitem__, set(columns_of(job.addresses)[0])):
            if leaf.cooker is not None or leaf.fields is None or not leaf.fields.can_collate:
                return None  # before anything is read, which would be read again

        try:
            rows, places = self.read_together(job.addresses)
            fields = {}
            for number, leaf_rows in rows.items():
                self.tell("decode_columns", leaf_rows.leaf.name, f"{len(leaf_rows.indices)} samples")
                fields[number] = leaf_rows.fields()
            self.tell("batch", "*", f"{len(job.addresses)} samples")
            return batch_of_rows(rows, fields, places, job.key, self.encoder.padding)
        except Exception as error:  # raised again when each sample is made, and reported with its sample
            self.fell_back("collate", job.addresses, error)
            return None

    # -- the reporting route --------------------------------------------------------------------------------------

    def _counted(self, rejected: Rejected, row: FailureStreak | None) -> FailureStreak:
        """Return the failures in a row of a place (None: none yet) with one more.

        Raises:
            FatalSampleError: there are too many.
        """
        row = row or FailureStreak(self.encoder.failure_tolerance, self._tolerances)
        if (end := row.add(rejected.failure)) is not None:
            raise end from (None if end.details else rejected.__cause__)  # else it would be shown twice
        return row

    def _samples(
        self, addresses: Sequence[Address], attempt: int, outcomes: list[Outcome], context: HookContext, number: int
    ) -> tuple[list[Any], Sequence[Address]]:
        """Return the samples at addresses, failed ones replaced (or left out), and their final addresses.

        Args:
            attempt: number of the attempt for the whole batch; each attempt has its own replacements.
            outcomes: list to which the outcomes are appended.
            number: number of the micro-batch.
        """
        batch_index = number if self.batched else None
        first = attempt and attempt * max(1, self.encoder.failure_tolerance, *self._tolerances.values())
        left, done = self.make(addresses, context, first, batch_index), list[Any]()
        for sample in left:
            done.append(sample)
            if type(sample) is Rejected:
                break  # its replacements are made before the other samples
        else:
            outcomes += map(_LEAF_OF, addresses)
            return done, addresses
        samples = list[Any]()
        places = list[Address]()
        for address, made in zip(addresses, chain(done, left), strict=True):
            tried = first
            row: FailureStreak | None = None
            while type(made) is Rejected:
                outcomes.append(made.failure.at(self.replacement(address, tried)))
                if not self.refill:
                    break
                tried += 1
                row = self._counted(made, row)
                made = self.one(address, context, tried, batch_index)
            else:
                samples.append(made)
                outcomes.append(address[0])
                places.append(self.replacement(address, tried) if tried else address)
        return samples, places

    def _batch(
        self, samples: list[Any], places: Sequence[Address], job: Job, context: HookContext, attempt: int = 0
    ) -> Any:
        batch: Any = samples
        # A batch that failed by chance has other random numbers in the next attempt.
        again = (0, attempt) if attempt else ()
        for name in self._batch_hooks:
            # Each hook has its own seed, so that its random numbers do not depend on how many another hook drew.
            origin = (_BATCH, job.pass_number, job.number, *(() if name == "batch" else (1,)), *again)
            context.move(self.seed, *origin, batch_index=job.number)
            hook = getattr(self.encoder, name)
            try:
                batch = self.guarded(name, "*", places, batch, hook, batch)
            except UnlikeError as unlike:
                raise unlike.named(SampleNames("", places, self.leaves).keys) from None
        set_restore_key(batch, job.key)
        return batch

    def _empty(self, result: Result, job: Job, context: HookContext) -> Sequence[Address]:
        """Put a batch without samples into the result of a job."""
        if self.batched and self.empty:
            if self._example is None:
                self._example = self._make_example(context)
            result.batch = self.empty_batch(*self._example, context, _BATCH, job.pass_number, job.number)
            set_restore_key(result.batch, job.key)
        return ()

    def _make_example(self, context: HookContext) -> tuple[Any, int]:
        """Return an example batch, made of the first samples that do not fail, and its size."""
        failure: Failure | None = None
        tried = 0
        tolerance = self.encoder.failure_tolerance
        for number, leaf in enumerate(self.leaves):
            samples: list[Any] = []
            places: list[Address] = []
            for index in range(leaf.length):
                tried += 1
                is_last = index + 1 == leaf.length or 0 < tolerance <= tried
                made = self.one((number, index, 0), context, batch_index=0)  # an existing sample
                if type(made) is Rejected:
                    failure = made.failure
                else:
                    samples.append(made)
                    places.append((number, index, 0))
                while len(samples) == 2 or (samples and is_last):
                    try:
                        return self._batch(samples, places, Job(0, -1, ()), context), len(samples)
                    except Rejected as rejected:  # other samples may fit together
                        failure = rejected.failure
                        samples = samples[1:]
                        places = places[1:]
                if is_last:
                    break
        assert failure is not None  # an order has samples
        raise too_many_failures(tried, failure, are_all=tried == sum(leaf.length for leaf in self.leaves))
