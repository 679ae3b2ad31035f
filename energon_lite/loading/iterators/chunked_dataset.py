"""A data set whose content decides how many batches there are: it is worked on in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from energon_lite.batching.chunks import ChunkPlan, default_lanes
from energon_lite.batching.strategy import describe
from energon_lite.errors import UnknownLengthError
from energon_lite.hooks import Hooks, hooks_of
from energon_lite.loading.iterators.dataset import BaseDataset
from energon_lite.loading.makers.chunk_job import START, Carried, ChunkJob, Place
from energon_lite.loading.makers.chunk_pipeline import ChunkPipeline
from energon_lite.loading.makers.token_chunks import BundlesByTokens, TokenBundling

__all__ = ["ChunkedDataset"]

#: What is left of a chunk's items goes to the chunk so many after it in the same lane. So chunks between the two can be
#: worked on at the same time; each of them adds a place to the state.
_HANDED_ON = 4


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkedDataset(BaseDataset):
    """What ``get_train_dataset`` and ``get_val_dataset`` return where hooks decide how many samples there are.

    Args:
        plan: which samples make up which chunk.
        lanes: among so many lanes chunks are dealt; None: see
            :func:`~energon_lite.batching.chunks.default_lanes`, for the ranks with which the run begins.
        drop_last: a pass ends with its last step in which every rank has a batch.
        bundling: batches are made by the lengths of encoded samples, in this way.
    """

    plan: ChunkPlan
    lanes: int | None = None
    drop_last: bool = False
    bundling: TokenBundling | None = None

    def pipeline(self) -> ChunkPipeline:
        """What runs this data set's jobs."""
        return ChunkPipeline(
            self.leaves,
            self.task_encoder,
            seed=self.seed,
            batch_size=self.plan.batch_size,
            packing_buffer_size=self.plan.packing_buffer_size,
            keep_remainder=self.plan.keep_remainder,
            error_handler=self.worker_config.global_error_handler,
            bundler=None if self.bundling is None else BundlesByTokens(self.bundling, self.task_encoder),
        )

    @cached_property
    def hooks(self) -> Hooks:
        """The hooks that are in force."""
        packing, batched = self.plan.packing_buffer_size is not None, self.plan.batch_size is not None
        return hooks_of(self.task_encoder, packing=packing, batched=batched, by_tokens=self.bundling is not None)

    @property
    def is_endless(self) -> bool:
        """Whether there is only one pass, which does not end."""
        return self.plan.count(0) is None

    def stride(self, lanes: int) -> int:
        """How many chunks further on the items are used that do not fill a batch at a chunk's end; 0: nowhere."""
        return lanes * _HANDED_ON if self.plan.carries else 0

    def job(
        self,
        pass_number: int,
        number: int,
        first: Place = START,
        *,
        empty: bool = False,
        stride: int = 0,
        carried: Carried | ChunkJob | None = None,
    ) -> ChunkJob:
        """The job that makes the batches of a chunk from ``first`` on, or an empty one in the likeness of its first.

        Args:
            stride, carried: see :class:`~energon_lite.loading.makers.chunk_job.ChunkJob`.
        """
        offset, count = 0 if self.hooks.whole_chunks else first.unit, self.plan.count(pass_number)
        samples = self.plan.addresses(number, pass_number, offset)
        is_last = count is not None and number + stride >= count
        return ChunkJob(pass_number, number, samples, offset, first, empty, stride, is_last, carried)

    def __len__(self) -> int:
        """Micro-batches per rank in one ``for`` loop.

        Raises:
            UnknownLengthError: without ``virtual_epoch_length`` nobody knows.
        """
        if self.loop_length:
            return self.loop_length
        raise UnknownLengthError(
            "how many batches there are is not known before the hooks have run",
            fix="give virtual_epoch_length; or count while you iterate",
        )

    def __str__(self) -> str:
        lanes = self.lanes or default_lanes(self.worker_config.world_size)
        by = "" if self.bundling is None else f"batches by {describe(self.bundling.strategy)}, "
        return self.describe(f"{by}chunks of {self.plan.chunk_size} samples, {lanes} lanes")
