"""Task encoder that wraps another one."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic

from energon_lite.batching.collate import Padding
from energon_lite.hooks.base import BatchT, EncodedT, PackedSamplesOutput, RawBatchT, SampleT, TaskEncoder
from energon_lite.hooks.cooking import Cooker, cook_function
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.stores.file_store import FileStore

__all__ = ["AugmentTaskEncoder"]


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

    @property
    def decoder(self) -> SampleDecoder | None:  # type: ignore[override]
        return self.task_encoder.decoder

    @property
    def cookers(self) -> Sequence[Cooker]:  # type: ignore[override]
        return self.task_encoder.cookers

    @property
    def failure_tolerance(self) -> int:  # type: ignore[override]
        return self.task_encoder.failure_tolerance

    @property
    def pack_capacity(self) -> int | None:  # type: ignore[override]
        return self.task_encoder.pack_capacity

    @property
    def padding(self) -> Padding:  # type: ignore[override]
        return self.task_encoder.padding

    def cook_crude_sample(
        self, sample: Any, cooker: Cooker, aux: Mapping[str, FileStore[Any]] | None = None
    ) -> SampleT:
        cooked: SampleT = cook_function(self.task_encoder)(sample, cooker, aux or {})
        return cooked

    def encode_sample(self, sample: SampleT) -> EncodedT | Iterator[EncodedT]:
        return self.task_encoder.encode_sample(sample)

    def preencode_sample(self, sample: Any) -> Any:
        return self.task_encoder.preencode_sample(sample)

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]] | PackedSamplesOutput[Any]:
        return self.task_encoder.select_samples_to_pack(samples)

    def postencode_sample(self, sample: Any) -> Any:
        return self.task_encoder.postencode_sample(sample)

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return self.task_encoder.pack_selected_samples(samples)

    def batch_group_criterion(self, sample: EncodedT) -> tuple[Hashable, int | None]:
        return self.task_encoder.batch_group_criterion(sample)

    def batch(self, samples: list[EncodedT]) -> RawBatchT | Iterator[RawBatchT]:
        return self.task_encoder.batch(samples)

    def encode_batch(self, batch: RawBatchT) -> BatchT | Iterator[BatchT]:
        return self.task_encoder.encode_batch(batch)

    def empty_batch(self, like: BatchT, rows: int) -> BatchT:
        return self.task_encoder.empty_batch(like, rows)
