"""Configuration of a run's data: sources, task encoder and micro-batches of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from energon_lite.errors import require, require_at_least


@dataclass(frozen=True)
class DataConfig:
    """Data section of a configuration: sources, task encoder and micro-batches of a step.

    Args:
        path: a prepared folder or a metadataset YAML, whose ``train`` split is the training data.
        val_path: the same for the ``val`` split; None to evaluate on that of ``path``, or on ``val`` alone.
        val: further validation sets, by their names in the metrics.
        task_encoder: ``module:Class`` of the task encoder, or a function that makes it; None for the trainer's, see
            :class:`MultimodalTaskEncoder`. It runs in the loader's worker processes.
        task_encoder_args: keyword arguments for it.
        micro_batch_size: samples in one forward and backward pass.
        micro_batches_per_step: micro-batches of an optimizer step, over *all* data-parallel ranks together. Each rank
            gets an equal share, so a run on another layout takes the same steps.
        workers: loader processes per rank; 0 loads in the training process.
        share: ``load``: all ranks of a model replica that need a batch load it; ``broadcast``: one rank loads it and
            sends it to the others.
        shuffle_buffer_size: window in samples within which sequences are mixed; None for a full permutation.
        max_samples_per_sequence: neighbours on disk that stay together in the order; None for single samples.
        max_length: tokens of a row; a longer caption is truncated, from a longer text a random window is taken.
        tokenizer: a folder with ``tokenizer.json``, or that file; None for the bytes of UTF-8.
        batching: strategy that groups samples into micro-batches by tokens, as a document such as ``{strategy:
            best_fit, capacity: 4096}``; ``micro_batch_size`` is then ignored. None: equal numbers of samples.
        length_column: the measured column with the tokens of each sample, for ``batching``.
        costs: file of a cost model (from ``energon-lite profile``): the micro-batches of a step are balanced in all
            kinds of work that it includes, see ``ByTokens.costs``. None: no balance beyond ``batching``.
        max_images: the most images of a packed micro-batch; None for no limit.
        prefetch_factor: micro-batches that each worker loads ahead; None for those of a whole step of the rank, and at
            least 2, so that loading overlaps computation with any gradient accumulation.
        repeat: False: the run ends after one epoch of all data, or of a ``blend_epochized``.
        skip_steps: steps, counted from 1, whose micro-batches are passed over; the steps use the next ones instead.
    """

    path: str
    val_path: str | None = None
    val: Mapping[str, str] | None = None
    task_encoder: str | None = None
    task_encoder_args: Mapping[str, Any] | None = None
    micro_batch_size: int = 8
    micro_batches_per_step: int = 4
    workers: int = 1
    shuffle_buffer_size: int | None = None
    max_samples_per_sequence: int | None = None
    max_length: int = 64
    share: str = "load"
    tokenizer: str | None = None
    batching: Mapping[str, Any] | None = None
    length_column: str = "length"
    costs: str | None = None
    max_images: int | None = None
    prefetch_factor: int | None = None
    repeat: bool = True
    skip_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        known = self.share in ("load", "broadcast")
        require(known, f"unknown way to share {self.share!r}", "data.share", "use one of: load, broadcast")
        require("" not in (self.val or {}), "a set has no name", "data.val", "name it, or give its path as val_path")
        require_at_least(self, "data", micro_batch_size=1, micro_batches_per_step=1, max_length=1)
        require_at_least(self, "data", workers=0, prefetch_factor=1)
        planned = self.batching is not None or (self.costs, self.max_images) == (None, None)
        require(
            planned, "costs, or max_images, without batching", "data.batching", "give e.g. {strategy: best_fit, ...}"
        )
        counted = all(step >= 1 for step in self.skip_steps)
        require(counted, "a step is below 1", "data.skip_steps", "steps are counted from 1; give e.g. [7, 8]")
