"""The user's side of the pipeline: what is done to each sample, and how samples become a batch.

    parts --decode--> sample --(cook)--> sample --encode_sample--> encoded --batch--> raw batch --encode_batch--> batch

With packing, the samples of a buffer are put together in packs before they are batched:

    sample --preencode_sample--> buffer --select_samples_to_pack--> samples of a pack
           --postencode_sample--> encoded samples of a pack --pack_selected_samples--> packed sample --batch--> ...

A hook may raise :class:`~energon_lite.SkipSample`; any other exception counts as a failed sample. Hooks run in worker
processes, for any sample, in any order, perhaps twice (when a worker died): they should depend on their arguments and
on their randomness only. That is ``self.rng`` and the *global* generators of Python, numpy and torch (CPU): a hook
finds them seeded for this very sample (or batch), and they are the caller's again afterwards. Hooks of yours are seeded
unless they say ``@stateless(restore_seeds=False)``, which saves some microseconds.

A hook may be a generator function (written with ``yield``), where its description says so; then it decides how many
results there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, cast

from typing_extensions import TypeVar

from energon_lite.batching.collate import Padding, batch_from_samples, empty_like, generic_batch
from energon_lite.errors import UsageError, WrongHookError
from energon_lite.hooks.context import current_context
from energon_lite.hooks.cooking import Cooker, given_stores
from energon_lite.hooks.packing import PackedSamplesOutput
from energon_lite.hooks.randomness import HookGenerator
from energon_lite.hooks.stateless import stateless
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.stores.cache_pool import CachePool
from energon_lite.storage.stores.file_store import FileStore

__all__ = ["BatchT", "EncodedT", "RawBatchT", "SampleT", "TaskEncoder", "fields_of", "fill"]

SampleT = TypeVar("SampleT", default=Any)
EncodedT = TypeVar("EncodedT", default=Any)
RawBatchT = TypeVar("RawBatchT", default=Any)
BatchT = TypeVar("BatchT", default=Any)


class TaskEncoder(Generic[SampleT, EncodedT, RawBatchT, BatchT]):
    """Override what your task needs; what is not overridden costs nothing.

    For type checkers it can be told what samples, encoded samples, raw batches and batches are, as in
    ``TaskEncoder[CaptioningSample, Encoded, RawBatch, Batch]``. Nothing else depends on it.

    Attributes:
        decoder: how parts become values; None gives hooks the raw bytes.
        cookers: for crude data sets; the first one that matches the data set's subflavors is used.
        failure_tolerance: so many samples failing in a row end the iteration; 0: no limit. Energon's
            ``__default_failure_tolerance__`` is taken for it.
        pack_capacity: tokens of a pack. With it, samples are packed, and ``select_samples_to_pack`` need not be
            written: samples make full packs as they come, by the length of what ``encode_sample`` (or
            ``preencode_sample``) returns. None: packing needs a selection of yours.
        padding: what the default ``batch`` does with tensors of one field whose shapes differ. None: that is an error.
            A number: pad their ends with it. ``"list"``: leave them in a list. A dict says it field by field.

    Example:
        >>> class Captions(TaskEncoder):
        ...     def encode_sample(self, sample: CaptioningSample) -> dict:
        ...         return {"image": sample.image, "tokens": tokenize(sample.caption)}
    """

    decoder: SampleDecoder | None = SampleDecoder()
    cookers: ClassVar[Sequence[Cooker]] = ()
    failure_tolerance: int = 100
    pack_capacity: int | None = None
    padding: Padding = None

    def __init_subclass__(cls, **more: Any):
        super().__init_subclass__(**more)
        if "__default_failure_tolerance__" in vars(cls) and "failure_tolerance" not in vars(cls):
            cls.failure_tolerance = vars(cls)["__default_failure_tolerance__"] or 0

    @stateless
    def cook_crude_sample(
        self, sample: Any, cooker: Cooker, aux: Mapping[str, FileStore[Any]] | None = None
    ) -> SampleT:
        """Make a sample out of a crude one; the default calls the cooker's function with what it needs.

        Args:
            sample: the crude one.
            cooker: the first one that is meant for its data set.
            aux: the stores of its data set, by name. With them is ``primary``, the data set itself, if the cooker needs
                it. One of yours may leave this argument out where nothing has any.
        """
        return cast(SampleT, cooker.cook(sample, **given_stores(cooker, sample, aux, lambda: self.cache)))

    @stateless
    def encode_sample(self, sample: SampleT) -> EncodedT | Iterator[EncodedT]:
        """Turn one sample into what shall go into a batch. May raise SkipSample, and may be a generator."""
        return cast(EncodedT, sample)

    @stateless
    def preencode_sample(self, sample: Any) -> Any:
        """In place of ``encode_sample``: what must be done before samples are selected for packing. May be a generator.

        With ``postencode_sample`` it divides the work on a sample in two: what selection needs (its length), and what
        is better done for selected samples only (decoding an image).
        """
        return sample

    @stateless
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]] | PackedSamplesOutput[Any]:
        """Say which samples of a buffer make up which pack; in force with ``packing_buffer_size``. Not needed with
        ``pack_capacity``.

        Args:
            samples: a buffer of at most ``packing_buffer_size`` samples, in their order.

        Returns:
            Lists of these samples. Those in no list are dropped, and counted; those that a ``PackedSamplesOutput``
            pushes back are the first of the next buffer.
        """
        raise NotImplementedError("packing needs a select_samples_to_pack of yours")

    @stateless
    def postencode_sample(self, sample: Any) -> Any:
        """The rest of the work on a sample: behind the selection for packing; without packing, right behind
        ``preencode_sample``, and then it may be a generator."""
        return sample

    @stateless
    def pack_selected_samples(self, samples: list[Any]) -> Any:
        """Make one sample out of the samples of a pack; in force with ``packing_buffer_size``. May be a generator."""
        raise NotImplementedError("packing needs a pack_selected_samples of yours")

    @stateless
    def batch_group_criterion(self, sample: EncodedT) -> tuple[Hashable, int | None]:
        """Say which samples may share a batch. Overriding it makes a batch of each group's samples.

        Returns:
            The group's key, and how many samples make up a batch of this group: the same for each sample of a group,
            and None if the data set was given a ``batch_size``.
        """
        return None, None

    @stateless
    def batch(self, samples: list[EncodedT]) -> RawBatchT | Iterator[RawBatchT]:
        """Turn encoded samples (at least one) into a batch. May be a generator, but not with groups."""
        return cast(RawBatchT, self._batch(samples, None))

    @stateless
    def encode_batch(self, batch: RawBatchT) -> BatchT | Iterator[BatchT]:
        """Last touch on a batch, in the worker. May be a generator."""
        return cast(BatchT, batch)

    def empty_batch(self, like: BatchT, rows: int) -> BatchT:
        """A batch without samples, for ranks that have none left at the end of a finite pass.

        Args:
            like: what ``encode_batch`` returned for ``rows`` samples of the same data.
            rows: see above.
        """
        return cast(BatchT, empty_like(like, rows))

    @property
    def rng(self) -> HookGenerator:
        """The running hook's own generator: equal for the same sample (or batch) whenever and wherever it is made.

        It is numpy's (``self.rng.integers(10)``); ``self.rng.torch`` and ``self.rng.random`` are torch's and Python's.
        """
        return current_context("rng").rng

    @property
    def current_sample_index(self) -> int:
        """Number of the sample in its leaf's stream: epoch * length + index.

        In ``select_samples_to_pack`` and ``pack_selected_samples``: a number of the buffer or the pack.
        """
        index = current_context("current_sample_index").sample_index
        if index is None:
            raise WrongHookError(
                "current_sample_index was asked for in a batch hook", fix="use current_batch_index there"
            )
        return index

    @property
    def current_batch_index(self) -> int:
        """Number of the micro-batch that is being made, counted over all ranks of the pass.

        In hooks of samples, too, where the plan knows which batch a sample is made for. A sample that depends on it can
        be made again with its batch only. Where hooks decide how many samples there are, it is a number that no other
        micro-batch of the pass has, and hooks of batches only have one.

        Raises:
            WrongHookError: nobody knows it; it ends the iteration.
        """
        index = current_context("current_batch_index").batch_index
        if index is None:
            raise WrongHookError(
                "current_batch_index was asked for in a hook of a sample of which it is not known which batch it goes "
                "into: hooks decide that, or the sample is made again by itself",
                fix="ask for it in batch or encode_batch; or use rng, which does not depend on the batch",
            )
        return index

    @property
    def cache(self) -> CachePool:
        """The cache pool that the loader was given; without one, a pool that keeps nothing."""
        return current_context("cache").cache

    def _batch(self, samples: list[Any], result_type: type | None) -> Any:
        """Collate field by field into ``result_type``, or into the samples' own type."""
        if result_type is None:
            return generic_batch(samples, self.padding)
        if dataclasses.is_dataclass(result_type) and hasattr(result_type, "from_samples"):
            return batch_from_samples(result_type, samples, self.padding)
        return fill(result_type, generic_batch(samples, self.padding))


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dict, a dataclass or a named tuple by name."""
    if isinstance(value, dict):
        return dict(value)
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    raise UsageError(
        f"fields cannot be copied from a {type(value).__name__}", fix="use a dataclass, a named tuple or a dict"
    )


def fill(cls: type, value: Any) -> Any:
    """An instance of ``cls`` from the fields of ``value`` that have the same names."""
    given = fields_of(value)
    if cls is dict:
        return given
    names: list[str] = (
        [f.name for f in dataclasses.fields(cls)]
        if dataclasses.is_dataclass(cls)
        else list(getattr(cls, "_fields", ()))
    )
    if not names:
        raise UsageError(f"{cls.__name__} has no fields", fix="give a dataclass, a named tuple or dict")
    return cls(**{name: given[name] for name in names if name in given})
