"""Base of the runners of jobs: from addresses to samples that are read together, decoded, cooked, and passed through
the hooks of single samples.

The bytes of all samples come from one read for each leaf. Only if that fails (a damaged shard, samples with different
parts), each sample is read by itself, so that an error is reported for the sample that has it, and for no other.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from energon_lite.batching.collate import rows_like
from energon_lite.errors import SampleError
from energon_lite.hooks import (
    HookContext,
    Hooks,
    TaskEncoder,
    cook_function,
    is_overridden,
    returns_its_argument,
)
from energon_lite.loading.makers.columns import Rows, columns_of
from energon_lite.loading.makers.hook_errors import NEVER_A_RESULT
from energon_lite.loading.makers.hook_steps import HookSteps
from energon_lite.loading.makers.leaf import Leaf, largest_mean_bytes, reads_ahead
from energon_lite.loading.makers.observers import ReadSample, StoredSample
from energon_lite.loading.makers.outcomes import Address, Failure, Rejected, Result, set_restore_key, where_of
from energon_lite.order.hashing import HashDomain, hash_ints
from energon_lite.storage.read.sample_reader import fetch_samples
from energon_lite.worker_config import ErrorHandler

if TYPE_CHECKING:
    from energon_lite.loading.makers.chunk_job import Made

#: Randomness of the hooks of single samples.
SAMPLE = HashDomain.SAMPLE_HOOKS.value
#: Choice of replacements.
_REPLACEMENT = HashDomain.REPLACEMENT.value
#: Bytes of shards that are read together, at most: it limits the memory of large samples that wait to be decoded.
READ_TOGETHER = 1 << 28


class JobRunner(HookSteps):
    """Runner of jobs, with the path that all jobs have in common: addresses -> fetch -> rows -> hooks. A subclass makes
    the result of a job from the samples.

    Args:
        leaves: the leaves, in the order's numbering.
        encoder: the user's hooks.
        hooks: the hooks that are in use.
        seed: 64-bit seed of all random numbers of the hooks.
        error_handler: see :class:`~energon_lite.WorkerConfig`.

    Attributes:
        services: objects of the loader: observers, the log of failures, the cache.
        sample_hooks: names and functions of the hooks that single samples go through, and whether they need the global
            generators seeded.
        largest: largest mean bytes of shard per sample over all leaves.
        reads_ahead: at least one of the leaves is on slow storage; see :meth:`prefetch`.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        encoder: TaskEncoder,
        hooks: Hooks,
        *,
        seed: int,
        error_handler: ErrorHandler | None = None,
    ):
        super().__init__(leaves, encoder, error_handler)
        self.hooks = hooks
        self.seed = seed
        self._cook = cook_function(encoder)
        self.sample_hooks = [
            (name, getattr(encoder, name), name in self.seeded_hooks)
            for name in hooks.sample
            if not returns_its_argument(encoder, name)
        ]
        self.reads_ahead = reads_ahead(leaves)
        self.largest = largest_mean_bytes(leaves)

    def run(self, job: Any) -> Result:
        """Return the result of a job; pure, so that any process can run it, also repeatedly."""
        raise NotImplementedError

    def batches(self, job: Any) -> Iterator[Made]:
        """Yield the batches of the job of a chunk, each made on request."""
        raise NotImplementedError

    def context(self, *origin: int, batch_index: int | None = None) -> HookContext:
        """Return a context for hooks that run for the loader."""
        services = self.services
        return HookContext(
            *origin, batch_index=batch_index, cache=services.cache_pool, worker_config=services.worker_config
        )

    # -- samples --------------------------------------------------------------------------------------------------

    def make(
        self, addresses: Sequence[Address], context: HookContext, attempt: int = 0, batch_index: int | None = None
    ) -> Iterator[Any]:
        """Yield each of the samples, made on request, or a :class:`Rejected` with the failure.

        Args:
            addresses: ``(leaf, index, epoch)``; followed by ``(start, length, is cut)`` for a piece of the sample.
            context: context of the hooks; it is entered whenever a sample is requested.
            attempt: 0: the samples themselves; k: the k-th replacement for each.
            batch_index: index of the micro-batch of the samples, if it is known.
        """
        return self.made(self.read(addresses, attempt), context, attempt, batch_index)

    def made(
        self, read: Iterable[ReadSample], context: HookContext, attempt: int = 0, batch_index: int | None = None
    ) -> Iterator[Any]:
        """Yield each of the samples that :meth:`read` has read; see :meth:`make`.

        Errors of hooks become outcomes as in :meth:`guarded`, which would cost a call for each hook of each sample.
        """
        observers = self.services.observers
        store = self.services.store
        fine: type[Any] | None = None  # the type of the last result that was checked
        for address, rows, at in read:
            leaf = self.leaves[address[0]]
            index = at if isinstance(rows, StoredSample) else rows.indices[at]
            epoch = address[2]
            key = ("sample", *address[:3], attempt)
            sample_index = epoch * leaf.length + index
            # As move(), whose call would cost too much here.
            context.move(self.seed, SAMPLE, leaf.key, epoch, index, sample_index=sample_index, batch_index=batch_index)
            stage = ""
            try:
                if isinstance(rows, StoredSample):
                    sample = rows.value
                    set_restore_key(sample, key)
                else:
                    name, sample = self.load(rows, at, key)
                    for stage, function, is_seeded in self.sample_hooks:
                        if observers:
                            self.tell(stage, leaf.name, name)
                        if is_seeded and context.seeds:
                            context.seed_globals()
                        value = function(sample)
                        if type(value) is not fine:
                            if type(value) in NEVER_A_RESULT or isinstance(value, BaseException):
                                self._check(value, stage, self._whose(name, leaf.name), (sample,))
                            else:
                                fine = type(value)
                        sample = value
                    stage = ""
                    if store is not None:
                        store.add((address[0], index, epoch), sample, key, context)
                if not self.hooks.batched:
                    set_restore_key(sample, key)
                if len(address) > 3:
                    from energon_lite.batching.sequence_batches import as_planned

                    named = leaf.name, f"sample {index}"
                    sample = self.guarded("plan", *named, sample, as_planned, sample, *address[3:])
            except Rejected as rejected:
                sample = rejected
            except Exception as error:  # of a hook: an outcome of its sample, as in guarded()
                if not stage:
                    raise
                sample = self._rejected(error, stage, leaf.name, name, sample)
            yield sample

    def move(
        self, context: HookContext, address: Address, *origin: int, tag: int = SAMPLE, batch_index: int | None = None
    ) -> HookContext:
        """Move a context to a sample.

        Args:
            address: ``(leaf, index, epoch)``.
            origin: numbers that identify an object among those of the sample.
            tag: tag that separates the hashes of different purposes.
            batch_index: index of its micro-batch, if it is known.
        """
        number, index, epoch = address
        leaf = self.leaves[number]
        sample_index = epoch * leaf.length + index
        where = self.seed, tag, leaf.key, epoch, index, *origin
        return context.move(*where, sample_index=sample_index, batch_index=batch_index)

    def one(self, address: Address, context: HookContext, attempt: int = 0, batch_index: int | None = None) -> Any:
        """Return the sample at an address, or a :class:`Rejected` with the failure."""
        return next(self.make((address,), context, attempt, batch_index))

    def results(self, address: Address, attempt: int = 0) -> tuple[list[Any], list[Failure]]:
        """Return all results of the sample hooks for an address, and the failures."""
        with self.context() as context:
            made = self.one(address, context, attempt)
        return ([], [made.failure]) if type(made) is Rejected else ([made], [])

    def restore(self, address: Address, attempt: int, number: int = 0) -> Any:
        """Return the sample at an address after the sample hooks: the ``number``-th of the samples that they yield.

        Raises:
            SampleError: it is skipped or fails, or the hooks yield fewer samples.
        """
        values, failures = self.results(address, attempt)
        if number < len(values):
            return values[number]
        if failures:
            raise unmade("the sample", failures[0])
        raise SampleError(
            f"the sample cannot be made: the hooks yield only {len(values)}",
            where=where_of(self.leaves[address[0]].name, f"sample {address[1]}"),
        )

    def replacement(self, address: Address, attempt: int) -> Address:
        """Return the address of the ``attempt``-th replacement for a sample; 0: the sample itself."""
        leaf_number, index, epoch = address[:3]
        if attempt:
            leaf = self.leaves[leaf_number]
            index = hash_ints(self.seed, _REPLACEMENT, leaf.key, epoch, index, attempt) % leaf.length
        return leaf_number, index, epoch

    def read(
        self, addresses: Sequence[Address], attempt: int = 0, *, together: int = sys.maxsize
    ) -> Iterable[ReadSample]:
        """Read samples. For each address, yield the rows that contain its sample, and the index in these rows.

        Args:
            together: largest number of samples in one read; there are fewer if they are large.
        """
        if not addresses:
            return ()
        if len(addresses) * self.largest > READ_TOGETHER:
            largest = max(self.leaves[leaf].mean_bytes for leaf, *_ in addresses)
            together = min(together, max(1, int(READ_TOGETHER / largest)))
        if len(addresses) > together:
            portions = (addresses[start : start + together] for start in range(0, len(addresses), together))
            return chain.from_iterable(self.read(some, attempt, together=together) for some in portions)
        wanted = addresses if not attempt else [self.replacement(address, attempt) for address in addresses]
        store = self.services.store
        return self.rows(addresses, wanted) if store is None else store.read(self.rows, addresses, wanted)

    def rows(self, addresses: Sequence[Address], wanted: Sequence[Address]) -> Iterable[ReadSample]:
        """Return, for each address, the rows that contain its sample, and the index in these rows.

        Args:
            wanted: for each address, the address of the sample that takes its place.
        """
        rows, places = self.read_together(wanted)
        if len(rows) == 1:
            return zip(addresses, repeat(*rows.values()), range(len(addresses)), strict=False)
        where = {
            place: (leaf_rows, at) for number, leaf_rows in rows.items() for at, place in enumerate(places[number])
        }
        return [(address, *where[place]) for place, address in enumerate(addresses)]

    def prefetch(self, addresses: Sequence[Address]) -> None:
        """Start to fetch samples from slow storage that will be made soon. Does not wait; changes no sample."""
        if self.reads_ahead:
            leaves = self.leaves
            addresses = addresses if self.services.store is None else self.services.store.missing(addresses)
            fetch_samples(((leaves[leaf].reader, index) for leaf, index, *_ in addresses), wait=False)

    def read_together(self, addresses: Sequence[Address]) -> tuple[dict[int, Rows], dict[int, Sequence[int]]]:
        """Read samples with one read for each leaf. Return the rows, and their places in ``addresses``, by leaf."""
        if self.reads_ahead:
            leaves = self.leaves
            if self.services.observers:
                self.tell("read", "*", f"{len(addresses)} samples")
            fetch_samples((leaves[leaf].reader, index) for leaf, index, *_ in addresses)
        numbers, indices = columns_of(addresses)
        places: dict[int, Sequence[int]] = {numbers[0]: range(len(numbers))}
        if numbers.count(numbers[0]) < len(numbers):
            of_leaf: dict[int, list[int]] = {}
            for place, number in enumerate(numbers):
                of_leaf.setdefault(number, []).append(place)
            places = {**of_leaf}
        rows = {}
        for number, mine in places.items():
            leaf_indices = indices if len(mine) == len(indices) else [indices[place] for place in mine]
            if self.services.observers:
                self.tell("read", self.leaves[number].name, f"{len(leaf_indices)} samples")
            rows[number] = Rows(self.leaves[number], leaf_indices, self.services.failures)
        return rows, places

    def fell_back(self, route: str, addresses: Sequence[Address], error: Exception) -> None:
        """Count an error on the fast route, see :meth:`FailureLog.fell_back`."""
        if self.services.failures is not None:
            self.services.failures.fell_back(route, (self.leaves[leaf].name for leaf, *_ in addresses), error)

    def load(self, rows: Rows, at: int, restore_key: tuple[Any, ...]) -> tuple[str, Any]:
        """Return the name of a sample, and the sample before the hooks (but cooked).

        Raises:
            Rejected: the sample was skipped or failed.
        """
        leaf = rows.leaf
        if rows.columns is not None:
            name = rows.columns.keys[at]
            if self.services.observers:
                self.tell("decode", leaf.name, name)
            sample = rows.sample(at, restore_key)
            if sample is not None:
                return name, sample
            raw = rows.raw(at)
        else:
            raw = self.guarded("read", leaf.name, f"sample {rows.indices[at]}", None, rows.raw, at)
        sample = self.guarded("decode", leaf.name, raw.key, raw.source, leaf.loader.load, raw, restore_key)
        if leaf.cooker is not None:
            given = self._cook, sample, leaf.cooker, dict(leaf.aux)  # the hook may change it
            sample = self.guarded("cook_crude_sample", leaf.name, raw.key, sample, *given)
        return raw.key, sample

    # -- batches -----------------------------------------------------------------------------------------------------

    def empty_batch(self, like: Any, rows: int, context: HookContext, *origin: int) -> Any:
        """Return the encoder's empty batch, made of a batch of ``rows`` rows; ``origin`` seeds its random numbers."""
        context.move(self.seed, *origin, 2)
        if "empty_batch" in self.seeded_hooks:
            context.seed_globals()
        if not is_overridden(self.encoder, "empty_batch"):
            rows = rows_like(like, rows, type(self.encoder).__name__)
        return self.encoder.empty_batch(copy.copy(like), rows)  # the hook may return what it is given


def unmade(what: str, failure: Failure) -> SampleError:
    """Return the error for a sample, or a batch, that is lost when it is made again."""
    where = where_of(failure.leaf, failure.key)
    error = SampleError(
        f"{what} cannot be made: {failure.stage}: {failure.reason}", where=where, fix=failure.fix or None
    )
    if failure.in_hook:  # its traceback was logged for the first failure of this kind only
        error.args = (f"{error}\n{failure.details.rstrip()}",)
    return error
