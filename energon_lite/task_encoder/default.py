"""The task encoder that is used when none is given."""

from __future__ import annotations

from typing import Any

from energon_lite.task_encoder.base import TaskEncoder, fill
from energon_lite.task_encoder.stateless import stateless

__all__ = ["DefaultTaskEncoder"]


class DefaultTaskEncoder(TaskEncoder):
    """Copies fields by name into the given types; batches by padding and stacking tensors, listing everything else.

    Args:
        encoded_sample_type: dataclass, named tuple or ``dict`` that ``encode_sample`` makes; None: the sample itself.
        raw_batch_type: what ``batch`` makes.
        batch_type: what ``encode_batch`` makes.
    """

    def __init__(
        self,
        *,
        encoded_sample_type: type | None = None,
        raw_batch_type: type | None = None,
        batch_type: type | None = None,
    ):
        self.encoded_sample_type = encoded_sample_type
        self.raw_batch_type = raw_batch_type
        self.batch_type = batch_type

    @stateless
    def encode_sample(self, sample: Any) -> Any:
        return sample if self.encoded_sample_type is None else fill(self.encoded_sample_type, sample)

    @stateless
    def batch(self, samples: list[Any]) -> Any:
        return self._batch(samples, self.raw_batch_type)

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        return batch if self.batch_type is None else fill(self.batch_type, batch)
