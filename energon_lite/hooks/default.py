"""The task encoder that is used when none is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, cast

from energon_lite.batching.collate import Padding
from energon_lite.hooks.base import BatchT, EncodedT, RawBatchT, SampleT, TaskEncoder, fill
from energon_lite.hooks.stateless import stateless

__all__ = ["DefaultTaskEncoder"]


class DefaultTaskEncoder(
    TaskEncoder[SampleT, EncodedT, RawBatchT, BatchT], Generic[SampleT, EncodedT, RawBatchT, BatchT]
):
    """Copies fields by name into the given types; batches by stacking tensors, and listing everything else.

    Args:
        encoded_sample_type: dataclass, named tuple or ``dict`` that ``encode_sample`` makes; None: the sample itself.
        raw_batch_type: what ``batch`` makes.
        batch_type: what ``encode_batch`` makes.
        padding: for tensors of unequal shape: a number to pad with, ``"list"``, or either field by field. None: the
            class's own, without which they are an error.

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
        made = sample if self.encoded_sample_type is None else fill(self.encoded_sample_type, sample)
        return cast(EncodedT, made)

    @stateless
    def batch(self, samples: list[EncodedT]) -> RawBatchT | Iterator[RawBatchT]:
        return cast(RawBatchT, self._batch(samples, self.raw_batch_type))

    @stateless
    def encode_batch(self, batch: RawBatchT) -> BatchT | Iterator[BatchT]:
        return cast(BatchT, batch if self.batch_type is None else fill(self.batch_type, batch))
