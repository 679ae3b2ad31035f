"""Base class of task encoders: the user hooks of the pipeline.

    parts --decode--> sample --(cook)--> sample --encode_sample--> encoded --batch--> raw batch --encode_batch--> batch

With packing, the samples of a buffer are grouped into packs before they are batched:

    sample --preencode_sample--> buffer --select_samples_to_pack--> samples of a pack
           --postencode_sample--> encoded samples of a pack --pack_selected_samples--> packed sample --batch--> ...

A hook may raise :class:`~energon_lite.SkipSample`; any other exception counts as a failed sample. Hooks run in worker
processes, for any sample, in any order, and possibly twice (if a worker died): they should depend only on their
arguments and on their randomness. The randomness is ``self.rng`` and the *global* generators of Python, numpy and torch
(CPU). The global generators are seeded for this sample (or batch) before a hook, and restored to the caller's state
after it. Hooks of samples that draw nothing from them in the first batch are not seeded any more; as soon as one draws,
the hooks of its batch run again, with seeds, and from then on all are seeded. ``@stateless(restore_seeds=True)`` has a
hook seeded always, and False never.

A hook may be a generator function (written with ``yield``) if its description says so; then it determines the number of
results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Generic, Protocol, cast

import torch
from typing_extensions import TypeVar

from energon_lite.batching.collate import Padding, batch_from_samples, empty_like, generic_batch
from energon_lite.errors import UsageError, WrongHookError
from energon_lite.hooks.context import HookGenerator, current_context
from energon_lite.hooks.cooking import Cooker, cook_function, given_stores
from energon_lite.hooks.global_generators import stateless
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.stores import CachePool, FileStore
from energon_lite.tensors import fields_of

T = TypeVar("T")
SampleT = TypeVar("SampleT", default=Any)
EncodedT = TypeVar("EncodedT", default=Any)
RawBatchT = TypeVar("RawBatchT", default=Any)
BatchT = TypeVar("BatchT", default=Any)


@dataclass(frozen=True)
class PackedSamplesOutput(Generic[T]):
    """Packs of a buffer, and samples that are pushed back into it.

    The next buffer starts with the samples that were pushed back, in their order, and is filled up with the samples
    that follow. So a pack need not be closed half full at the end of a buffer. At the end of a chunk, samples that are
    the last ones of their buffer move to a later chunk. Others are selected again separately, as long as that makes
    packs; samples that are pushed back then are dropped, and counted.

    Args:
        packs: lists of samples.
        pushback: samples of the buffer, or remainders of them.

    Example:
        >>> def select_samples_to_pack(self, samples):
        ...     packs = greedy(samples, 4096)
        ...     return PackedSamplesOutput(packs[:-1], pushback=packs[-1])
    """

    packs: Sequence[Sequence[T]]
    pushback: Sequence[T] = ()


class DeviceDecoder(Protocol):
    """Decoder for the hook ``encode_on_device``."""

    def opened(self, device: torch.device) -> str:
        """Prepare for a device; return the name of what decodes for it, which is recorded in states."""


class TaskEncoder(Generic[SampleT, EncodedT, RawBatchT, BatchT]):
    """Base class of task encoders: override the hooks that your task needs; others cost nothing.

    The types of samples, encoded samples, raw batches and batches can be given for type checkers, as in
    ``TaskEncoder[CaptioningSample, Encoded, RawBatch, Batch]``. They have no effect at run time.

    Attributes:
        decoder: decoder of parts into values; None gives hooks the raw bytes.
        cookers: cookers of crude data sets; the first one that matches the data set's subflavors is used.
        failure_tolerance: number of consecutive failed samples that ends the iteration; 0: no limit. Energon's
            ``__default_failure_tolerance__`` is used if only that is given.
        pack_capacity: tokens of a pack. If given, samples are packed, and ``select_samples_to_pack`` is optional:
            samples fill packs in their order, by the length of the result of ``encode_sample`` (or
            ``preencode_sample``). None: packing requires your ``select_samples_to_pack``.
        padding: treatment of tensors of one field whose shapes differ, in the default ``batch``. None: an error. A
            number: pad their ends with it. ``"list"``: keep them in a list. A dict gives the treatment for each field.
        device_decoder: decoder that ``encode_on_device`` uses; None: none that states should record.

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
    device_decoder: DeviceDecoder | None = None

    def __init_subclass__(cls, **more: Any):
        super().__init_subclass__(**more)
        if "__default_failure_tolerance__" in vars(cls) and "failure_tolerance" not in vars(cls):
            cls.failure_tolerance = vars(cls)["__default_failure_tolerance__"] or 0

    @stateless
    def cook_crude_sample(
        self, sample: Any, cooker: Cooker, aux: Mapping[str, FileStore[Any]] | None = None
    ) -> SampleT:
        """Make a sample of a crude one; the default calls the cooker's function with the stores that it needs.

        Args:
            sample: the crude sample.
            cooker: the first cooker that matches its data set.
            aux: the stores of its data set, by name. They include ``primary``, the data set itself, if the cooker needs
                it. An override may omit this argument if no data set has stores.
        """
        return cast(SampleT, cooker.cook(sample, **given_stores(cooker, sample, aux, lambda: self.cache)))

    @stateless
    def encode_sample(self, sample: SampleT) -> EncodedT | Iterator[EncodedT]:
        """Turn one sample into the element of a batch. May raise SkipSample, and may be a generator."""
        return cast(EncodedT, sample)

    @stateless
    def preencode_sample(self, sample: Any) -> Any:
        """Replace ``encode_sample`` by the work that must precede the selection for packing. May be a generator.

        Together with ``postencode_sample`` it splits the work on a sample: the part that the selection needs (its
        length), and the part that is better done for selected samples only (such as decoding an image).
        """
        return sample

    @stateless
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]] | PackedSamplesOutput[Any]:
        """Group the samples of a buffer into packs; used with ``packing_buffer_size``.

        It is optional with ``pack_capacity``.

        Args:
            samples: a buffer of at most ``packing_buffer_size`` samples, in stream order.

        Returns:
            Lists of these samples. Samples in no list are dropped, and counted; samples that a ``PackedSamplesOutput``
            pushes back are the first of the next buffer.
        """
        raise NotImplementedError("packing needs a select_samples_to_pack in the task encoder")

    @stateless
    def postencode_sample(self, sample: Any) -> Any:
        """Finish the work on a sample after its selection for packing.

        Without packing it runs directly after ``preencode_sample``, and may be a generator.
        """
        return sample

    @stateless
    def pack_selected_samples(self, samples: list[Any]) -> Any:
        """Make one sample of the samples of a pack; used with ``packing_buffer_size``. May be a generator."""
        raise NotImplementedError("packing needs a pack_selected_samples in the task encoder")

    @stateless
    def batch_group_criterion(self, sample: EncodedT) -> tuple[Hashable, int | None]:
        """Return the group of a sample. If this is overridden, batches consist of samples of one group.

        Returns:
            The group's key, and the batch size of the group: equal for all samples of a group, and None if the data set
            was given a ``batch_size``.
        """
        return None, None

    @stateless
    def batch(self, samples: list[EncodedT]) -> RawBatchT | Iterator[RawBatchT]:
        """Assemble encoded samples (at least one) into a batch. May be a generator, but not with groups."""
        return cast(RawBatchT, self._batch(samples, None))

    @stateless
    def encode_batch(self, batch: RawBatchT) -> BatchT | Iterator[BatchT]:
        """Finish a batch in the worker. May be a generator."""
        return cast(BatchT, batch)

    @stateless
    def encode_on_device(self, batch: BatchT) -> Any:
        """Finish a batch where ``loader.to(device)`` has moved it, on the stream of the copy; also for ``"cpu"``.

        It runs in the trainer's process, once for each batch that is delivered. The randomness, also of the device's
        global generator, depends on the seed and on the samples in the batch. An error ends the ``for`` loop; a batch
        that cannot be used has no replacement.
        """
        return batch

    def empty_batch(self, like: BatchT, rows: int) -> BatchT:
        """Make a batch without samples, for ranks that have none left at the end of a finite pass.

        Args:
            like: a result of ``encode_batch`` for ``rows`` samples of the same data.
            rows: number of samples in ``like``.
        """
        return cast(BatchT, empty_like(like, rows))

    @property
    def rng(self) -> HookGenerator:
        """Random generator of the running hook: equal for the same sample (or batch), independent of time and place.

        It is numpy's (``self.rng.integers(10)``); ``self.rng.torch`` and ``self.rng.random`` are torch's and Python's.
        """
        return current_context("rng").rng

    @property
    def current_sample_index(self) -> int:
        """Number of the sample in its leaf's stream: epoch * length + index.

        In ``select_samples_to_pack`` and ``pack_selected_samples``, it is the number of the buffer or the pack.
        """
        context = current_context("current_sample_index")
        context.asked = context.asked or "sample"
        index = context.sample_index
        if index is None:
            raise WrongHookError(
                "current_sample_index was asked for in a batch hook", fix="use current_batch_index there"
            )
        return index

    @property
    def current_batch_index(self) -> int:
        """Number of the current micro-batch, counted over all ranks of the pass.

        It is available in sample hooks, too, if the plan determines the batch of a sample. A sample that depends on it
        can be made again only with its batch. If batches are content-decided, it is a number that is unique in the
        pass, and available in batch hooks only.

        Raises:
            WrongHookError: the number is unknown; the error ends the iteration.
        """
        context = current_context("current_batch_index")
        context.asked = "batch"
        index = context.batch_index
        if index is None:
            raise WrongHookError(
                "current_batch_index was asked for in a hook of a sample of which it is not known which batch it goes "
                "into: hooks decide that, or the sample is made again by itself",
                fix="ask for it in batch or encode_batch; or use rng, which does not depend on the batch",
            )
        return index

    @property
    def cache(self) -> CachePool:
        """Cache pool of the loader; without one, a pool that stores nothing."""
        return current_context("cache").cache

    def _batch(self, samples: list[Any], result_type: type | None) -> Any:
        """Collate samples field by field into ``result_type``, or into the samples' own type."""
        if result_type is None:
            return generic_batch(samples, self.padding)
        if dataclasses.is_dataclass(result_type) and hasattr(result_type, "from_samples"):
            return batch_from_samples(result_type, samples, self.padding)
        return fill(result_type, generic_batch(samples, self.padding))


def fill(cls: type, value: Any) -> Any:
    """Make an instance of ``cls`` from the fields of ``value`` with the same names."""
    given = fields_of(value)
    if given is None:
        raise UsageError(
            f"fields cannot be copied from a {type(value).__name__}", fix="use a dataclass, a named tuple or a dict"
        )
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


class DefaultTaskEncoder(
    TaskEncoder[SampleT, EncodedT, RawBatchT, BatchT], Generic[SampleT, EncodedT, RawBatchT, BatchT]
):
    """Task encoder that copies fields by name into the given types, stacks tensors and lists everything else.

    Args:
        encoded_sample_type: dataclass, named tuple or ``dict`` that ``encode_sample`` returns; None: the sample itself.
        raw_batch_type: type that ``batch`` returns.
        batch_type: type that ``encode_batch`` returns.
        padding: treatment of tensors of different shapes: a number to pad with, ``"list"``, or a dict of these by
            field. None: the attribute of the class, whose default makes them an error.

    Example:
        >>> DefaultTaskEncoder(padding=0)
    """

    def __init__(
        self,
        *,
        encoded_sample_type: type | None = None,
        raw_batch_type: type | None = None,
        batch_type: type | None = None,
        padding: Padding = None,
    ):
        self.encoded_sample_type = encoded_sample_type
        self.raw_batch_type = raw_batch_type
        self.batch_type = batch_type
        if padding is not None:
            self.padding = padding

    @stateless
    def encode_sample(self, sample: SampleT) -> EncodedT | Iterator[EncodedT]:
        encoded = sample if self.encoded_sample_type is None else fill(self.encoded_sample_type, sample)
        return cast(EncodedT, encoded)

    @stateless
    def batch(self, samples: list[EncodedT]) -> RawBatchT | Iterator[RawBatchT]:
        return cast(RawBatchT, self._batch(samples, self.raw_batch_type))

    @stateless
    def encode_batch(self, batch: RawBatchT) -> BatchT | Iterator[BatchT]:
        return cast(BatchT, batch if self.batch_type is None else fill(self.batch_type, batch))


class AugmentTaskEncoder(
    TaskEncoder[SampleT, EncodedT, RawBatchT, BatchT], Generic[SampleT, EncodedT, RawBatchT, BatchT]
):
    """Task encoder that delegates to another one, except for the hooks that you override.

    All hooks, settings and marks are those of the wrapped encoder, including its cookers, packing and groups. Hooks
    that you do not override cost nothing. If a hook of the wrapped encoder calls another hook, it calls its own.

    Args:
        task_encoder: the wrapped encoder.

    Example:
        >>> class Upper(AugmentTaskEncoder):
        ...     def encode_sample(self, sample):
        ...         encoded = super().encode_sample(sample)
        ...         encoded["text"] = encoded["text"].upper()
        ...         return encoded
        >>> dataset = get_train_dataset("prose", task_encoder=Upper(Texts()), batch_size=4, worker_config=config)
    """

    def __init__(self, task_encoder: TaskEncoder[SampleT, EncodedT, RawBatchT, BatchT]):
        self.task_encoder = task_encoder

    def __getattr__(self, name: str) -> Any:
        if name == "task_encoder" or (name.startswith("__") and name.endswith("__")):  # not initialized yet
            raise AttributeError(name)
        return getattr(self.task_encoder, name)

    @property
    def _task_encoder(self) -> TaskEncoder[SampleT, EncodedT, RawBatchT, BatchT]:
        """The wrapped encoder, by Energon's name."""
        return self.task_encoder

    def cook_crude_sample(
        self, sample: Any, cooker: Cooker, aux: Mapping[str, FileStore[Any]] | None = None
    ) -> SampleT:
        return cook_function(self.task_encoder)(sample, cooker, aux or {})


def _delegating(name: str) -> Callable[..., Any]:
    """Method of :class:`AugmentTaskEncoder` that calls the method of this name of the wrapped encoder."""

    @functools.wraps(getattr(TaskEncoder, name))
    def hook(self: AugmentTaskEncoder, *arguments: Any, **more: Any) -> Any:
        return getattr(self.task_encoder, name)(*arguments, **more)

    return hook


for _name in ("decoder", "cookers", "device_decoder", "failure_tolerance", "pack_capacity", "padding"):
    setattr(AugmentTaskEncoder, _name, property(attrgetter(f"task_encoder.{_name}")))
for _name in (
    *("encode_sample", "preencode_sample", "select_samples_to_pack", "postencode_sample", "pack_selected_samples"),
    *("batch_group_criterion", "batch", "encode_batch", "encode_on_device", "empty_batch"),
):
    setattr(AugmentTaskEncoder, _name, _delegating(_name))
