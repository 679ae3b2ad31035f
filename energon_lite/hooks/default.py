"""Default task encoder, for data sets without one."""

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
