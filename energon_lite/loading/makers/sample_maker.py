"""From addresses to samples: read together, decoded, cooked, and passed through the hooks of single samples.

The bytes of all samples come from one read for each leaf. Only if that fails (a damaged shard, samples with different
parts), each sample is read by itself, so that an error is reported for the sample that has it, and for no other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import chain, repeat
from typing import Any

from energon_lite.errors import FatalSampleError, SkipSample
from energon_lite.hooks import (
    HookContext,
    Hooks,
    TaskEncoder,
    cook_function,
    is_overridden,
    own_hooks,
    returns_its_argument,
    running_context,
    seeded_hooks,
)
from energon_lite.loading.makers.columns import Rows, columns_of, in_order
from energon_lite.loading.makers.empty_batch import empty_batch
from energon_lite.loading.makers.failure_log import FailureLog
from energon_lite.loading.makers.hook_errors import (
    FATAL,
    NEVER_A_RESULT,
    as_infrastructure_error,
    failure_of,
    note_where,
    returned_nothing,
    sources_of,
    wrong_result,
)
from energon_lite.loading.makers.leaf import Leaf, largest_mean_bytes, reads_ahead
from energon_lite.loading.makers.observers import Observer
from energon_lite.loading.makers.outcomes import Address, Failure, Rejected
from energon_lite.loading.makers.sample_length import as_planned
from energon_lite.loading.makers.sample_names import SampleNames
from energon_lite.loading.makers.user_frames import hook_traceback
from energon_lite.order.hashing import HashDomain, hash_ints
from energon_lite.storage.read.sample_reader import fetch_samples
from energon_lite.storage.stores.lazy import CachePool
from energon_lite.worker_config import ErrorHandler, WorkerConfig

__all__ = ["SAMPLE", "SampleMaker", "set_restore_key"]

#: Randomness of the hooks of single samples.
SAMPLE = HashDomain.SAMPLE_HOOKS.value
#: Choice of replacements.
_REPLACEMENT = HashDomain.REPLACEMENT.value
#: Bytes of shards that are read together, at most: it limits the memory of large samples that wait to be decoded.
_READ_TOGETHER = 1 << 28


class SampleMaker:
    """Maker of samples.

    Args:
        leaves: the leaves, in the order's numbering.
        encoder: the user's hooks.
        hooks: the hooks that are in use.
        seed: 64-bit seed of all random numbers of the hooks.
        error_handler: see :class:`~energon_lite.WorkerConfig`.

    Attributes:
        failures: log that each failure is reported to at once; None: no log.
        observers: observers of each step. Without observers, notifications cost nothing.
        cache_pool: the ``self.cache`` of hooks; None: a pool that keeps nothing.
        worker_config: configuration of the loader; None: there is none.
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
        self.leaves = leaves
        self.encoder = encoder
        self.hooks = hooks
        self.seed = seed
        self.error_handler = error_handler
        self.failures: FailureLog | None = None
        self.observers: tuple[Observer, ...] = ()
        self.cache_pool: CachePool | None = None
        self.worker_config: WorkerConfig | None = None
        self._cook = cook_function(encoder)
        self._own = own_hooks(encoder)
        self.seeded_hooks = seeded_hooks(encoder)
        self._sample_hooks = [
            (name, getattr(encoder, name)) for name in hooks.sample if not returns_its_argument(encoder, name)
        ]
        self.reads_ahead = reads_ahead(leaves)
        self._largest = largest_mean_bytes(leaves)

    def __getstate__(self) -> dict[str, Any]:
        config = self.worker_config
        return self.__dict__ | {"worker_config": None if config is None else config.for_workers()}

    def context(self, *origin: int, batch_index: int | None = None) -> HookContext:
        """Return a context for hooks that run for the loader."""
        return HookContext(*origin, batch_index=batch_index, cache=self.cache_pool, worker_config=self.worker_config)

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
        for address, rows, at in self.read(addresses, attempt):
            yield self.made(rows, at, address, ("sample", *address[:3], attempt), context, batch_index)

    def make_together(self, addresses: Sequence[Address]) -> list[Any] | None:
        """Return the samples if no hook sees them before the batch hooks do; None: they must be made one by one."""
        if self._sample_hooks or not self.hooks.batched or len(addresses[0]) > 3:
            return None
        if any(observer.times_samples for observer in self.observers):
            return None
        if len(addresses) * self._largest > _READ_TOGETHER:
            return None
        for number in {address[0] for address in addresses}:
            fields = self.leaves[number].fields
            if fields is None or fields.decodes:
                return None  # a damaged sample, or one that needs a loader, would have all samples decoded twice
        try:
            rows, places = self.read_together(addresses)
            keys = {number: [("sample", *addresses[place], 0) for place in mine] for number, mine in places.items()}
            made = []
            for number, leaf_rows in rows.items():
                if self.observers:
                    self._tell_columns(leaf_rows)
                samples = leaf_rows.samples(keys[number])
                if samples is None:
                    return None
                made.append(samples)
        except Exception as error:
            self.fell_back("decode_together", addresses, error)
            return None  # the error is raised again when each sample is made, and reported with its sample
        return made[0] if len(made) == 1 else in_order(made, places)

    def one(self, address: Address, context: HookContext, attempt: int = 0, batch_index: int | None = None) -> Any:
        """Return the sample at an address, or a :class:`Rejected` with the failure."""
        return next(self.make((address,), context, attempt, batch_index))

    def replacement(self, address: Address, attempt: int) -> Address:
        """Return the address of the ``attempt``-th replacement for a sample; 0: the sample itself."""
        leaf_number, index, epoch = address[:3]
        if attempt:
            leaf = self.leaves[leaf_number]
            index = hash_ints(self.seed, _REPLACEMENT, leaf.key, epoch, index, attempt) % leaf.length
        return leaf_number, index, epoch

    def read(
        self, addresses: Sequence[Address], attempt: int = 0, *, together: int = sys.maxsize
    ) -> Iterable[tuple[Address, Rows, int]]:
        """Read samples. For each address, yield the rows that contain its sample, and the index in these rows.

        Args:
            together: largest number of samples in one read; there are fewer if they are large.
        """
        if not addresses:
            return ()
        if len(addresses) * self._largest > _READ_TOGETHER:
            largest = max(self.leaves[leaf].mean_bytes for leaf, *_ in addresses)
            together = min(together, max(1, int(_READ_TOGETHER / largest)))
        if len(addresses) > together:
            portions = (addresses[start : start + together] for start in range(0, len(addresses), together))
            return chain.from_iterable(self.read(some, attempt, together=together) for some in portions)
        wanted = addresses if not attempt else [self.replacement(address, attempt) for address in addresses]
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
            fetch_samples(((leaves[leaf].reader, index) for leaf, index, *_ in addresses), wait=False)

    def read_together(self, addresses: Sequence[Address]) -> tuple[dict[int, Rows], dict[int, Sequence[int]]]:
        """Read samples with one read for each leaf. Return the rows, and their places in ``addresses``, by leaf."""
        if self.reads_ahead:
            leaves = self.leaves
            if self.observers:
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
            if self.observers:
                self.tell("read", self.leaves[number].name, f"{len(leaf_indices)} samples")
            rows[number] = Rows(self.leaves[number], leaf_indices, self.failures)
        return rows, places

    def fell_back(self, route: str, addresses: Sequence[Address], error: Exception) -> None:
        """Count an error on the fast route, see :meth:`FailureLog.fell_back`."""
        if self.failures is not None:
            self.failures.fell_back(route, (self.leaves[leaf].name for leaf, *_ in addresses), error)

    def fields_of(self, rows: Mapping[int, Rows]) -> dict[int, dict[str, list[Any]]]:
        """Return the fields of the rows, by leaf."""
        fields = {}
        for number, leaf_rows in rows.items():
            if self.observers:
                self._tell_columns(leaf_rows)
            fields[number] = leaf_rows.fields()
        return fields

    def made(
        self,
        rows: Rows,
        at: int,
        address: Address,
        key: tuple[Any, ...],
        context: HookContext,
        batch_index: int | None = None,
    ) -> Any:
        """Return the sample at an index of ``rows``, or a :class:`Rejected` with the failure."""
        leaf = rows.leaf
        index = rows.indices[at]
        epoch = address[2]
        number = epoch * leaf.length + index
        context.move(self.seed, SAMPLE, leaf.key, epoch, index, sample_index=number, batch_index=batch_index)
        try:
            sample = None if self.observers else rows.sample(at, key)
            if sample is None or rows.columns is None:
                name, sample = self.load(rows, at, key, is_tried=not self.observers)
            else:
                name = rows.columns.keys[at]
            for hook, function in self._sample_hooks:
                sample = self.guarded(hook, leaf.name, name, sample, function, sample)
            if not self.hooks.batched:
                set_restore_key(sample, key)
            if len(address) > 3:
                sample = self.guarded("plan", leaf.name, f"sample {index}", sample, as_planned, sample, *address[3:])
            return sample
        except Rejected as rejected:
            return rejected

    def load(self, rows: Rows, at: int, restore_key: tuple[Any, ...], *, is_tried: bool = False) -> tuple[str, Any]:
        """Return the name of a sample, and the sample before the hooks (but cooked).

        Args:
            is_tried: the rows have been asked for the sample and returned None.

        Raises:
            Rejected: the sample was skipped or failed.
        """
        leaf = rows.leaf
        if rows.columns is not None:
            name = rows.columns.keys[at]
            if self.observers:
                self.tell("decode", leaf.name, name)
            sample = None if is_tried else rows.sample(at, restore_key)
            if sample is not None:
                return name, sample
            raw = rows.raw(at)
        else:
            raw = self.guarded("read", leaf.name, f"sample {rows.indices[at]}", None, rows.raw, at)
        sample = self.guarded("decode", leaf.name, raw.key, raw.source, leaf.loader.load, raw, restore_key)
        if leaf.cooker is not None:
            given = self._cook, sample, leaf.cooker, leaf.aux
            sample = self.guarded("cook_crude_sample", leaf.name, raw.key, sample, *given)
        return raw.key, sample

    def _tell_columns(self, rows: Rows) -> None:
        self.tell("decode_columns", rows.leaf.name, f"{len(rows.indices)} samples")

    # -- observers ------------------------------------------------------------------------------------------------

    def tell(self, stage: str, leaf: str, key: str) -> None:
        """Notify the observers that a step is about to begin."""
        for observer in self.observers:
            observer.step(stage, leaf, key)

    def end(self, addresses: Sequence[Address | None]) -> dict[str, Any] | None:
        """Notify the observers that the batch of these samples is made; return the trace of the first that has one."""
        traces = [observer.end(addresses) for observer in self.observers]
        return next((trace for trace in traces if trace is not None), None)

    # -- steps ----------------------------------------------------------------------------------------------------

    def empty_batch(self, like: Any, rows: int, context: HookContext, *origin: int) -> Any:
        """Return the encoder's empty batch, made of a batch of ``rows`` rows; ``origin`` seeds its random numbers."""
        context.move(self.seed, *origin, 2)
        if "empty_batch" in self.seeded_hooks:
            context.seed_globals()
        return empty_batch(self.encoder, like, rows)

    def guarded(
        self,
        stage: str,
        leaf: str,
        key: str | SampleNames | Sequence[Address],
        subject: Any,
        step: Callable[..., Any],
        *arguments: Any,
    ) -> Any:
        """Run one step.

        Args:
            stage, leaf, key: see :class:`~energon_lite.loading.makers.observers.Observer`. In place of the key, the
                addresses of samples, from which the key is made if it is needed.
            subject: argument for the user's error handler if the step fails.

        Raises:
            Rejected: the step raised an error that fails the sample.
            FatalSampleError: the step raised an error that ends the iteration, or returned a value that no hook may.
        """
        try:
            if self.observers:
                self.tell(stage, leaf, key if isinstance(key, str) else f"{self.names(key):short}")
            if stage in self.seeded_hooks and (context := running_context()) is not None:
                context.seed_globals()
            value = step(*arguments)
            if type(value) in NEVER_A_RESULT or isinstance(value, BaseException):
                self._check(value, stage, self._whose(key, leaf), arguments)
            return value
        except SkipSample as skip:
            failure = Failure(leaf, f"{self.names(key)}", stage, str(skip) or "SkipSample", skipped=True)
            raise Rejected(failure) from None
        except (StopIteration, StopAsyncIteration) as error:  # a generator would turn it into another error
            raise FatalSampleError(
                f"{stage} raised {type(error).__name__} for {self._whose(key, leaf)}",
                fix="an iterator had no more: give next() a default, or catch this; SkipSample leaves a sample out",
                details=hook_traceback(error),
            ) from None
        except FATAL as error:
            note_where(error, stage, self._whose(key, leaf))
            raise
        except Exception as error:
            if (end := as_infrastructure_error(error, stage, leaf, f"{self.names(key)}")) is not None:
                raise end from (None if end.details else error)
            if self.error_handler is not None:
                sources = sources_of(subject)
                self.error_handler(error, subject, None if sources is None else list(sources))
            failure = failure_of(error, stage, leaf, f"{self.names(key)}")
            if self.failures is not None:
                self.failures.tell(failure)
            raise Rejected(failure) from error

    def names(self, key: str | SampleNames | Sequence[Address]) -> SampleNames | str:
        """Return the name of samples in messages."""
        if isinstance(key, (str, SampleNames)):
            return key
        return SampleNames(f"{len(key)} samples", key, self.leaves)

    def _whose(self, key: str | SampleNames | Sequence[Address], leaf: str) -> str:
        return f"{self.names(key)}" if leaf == "*" else f"{self.names(key)} of {leaf}"

    def _check(self, value: Any, stage: str, whose: str, arguments: Sequence[Any]) -> None:
        """Refuse a value that no hook may return."""
        if stage not in self._own:
            return
        is_cooker = stage == "cook_crude_sample" and not is_overridden(self.encoder, stage)
        function = arguments[1].cook if is_cooker else getattr(self.encoder, stage)
        if value is None:
            raise returned_nothing(stage, function, whose=whose)
        if (error := wrong_result(value, stage, function, whose)) is not None:
            raise error


def set_restore_key(value: Any, key: tuple[Any, ...]) -> None:
    """Store the restore key of a sample or a batch in it, if it has a place for it."""
    if isinstance(value, dict):
        if "__restore_key__" in value:
            value["__restore_key__"] = key
    elif is_dataclass(value) and hasattr(value, "__restore_key__"):
        object.__setattr__(value, "__restore_key__", key)
