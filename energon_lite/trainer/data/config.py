"""Where the samples of a run come from, and how many go into a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from energon_lite.errors import require, require_at_least


@dataclass(frozen=True)
class DataConfig:
    """Where the samples come from, and how many go into a step.

    Args:
        path: a prepared folder or a metadataset YAML; its ``train`` split is trained on.
        val_path: likewise, for the ``val`` split; None to evaluate on that of ``path``, or on ``val`` alone.
        val: further sets to evaluate on, by the names that they have in the metrics.
        task_encoder: ``module:Class`` of the task encoder, or a function that makes it; None for the trainer's, see
            :class:`MultimodalTaskEncoder`. It runs in the loader's processes.
        task_encoder_args: keyword arguments for it.
        micro_batch_size: samples in one forward and backward pass.
        micro_batches_per_step: micro-batches of an optimizer step, over *all* data-parallel ranks together. Each rank
            gets its equal share, so a run on another layout takes the same steps.
        workers: loader processes per rank; 0 loads in the training process.
        share: ``load``: all ranks of a model replica that need a batch load it; ``broadcast``: one loads it and sends
            it to the others.
        shuffle_buffer_size: samples among which runs are mixed; None for a full permutation.
        max_samples_per_sequence: neighbours on disk that stay together before mixing; None for single samples.
        max_length: tokens of a row; a longer caption is cut, from a longer text a window is taken.
        tokenizer: a folder with ``tokenizer.json``, or that file; None for the bytes of UTF-8.
        batching: how micro-batches are made by the tokens of their samples, as a strategy's document, for example
            ``{strategy: best_fit, capacity: 4096}``; ``micro_batch_size`` has no meaning then. None: of equally many
            samples.
        length_column: the measured column that has the tokens of each sample, for ``batching``.
        costs: file of a cost model (``energon-lite profile`` writes one): the micro-batches of a step are even in all
            kinds of work that it knows, see ``ByTokens.costs``. None: they are as ``batching`` makes them.
        max_images: images that a packed micro-batch may hold; None for any number.
        prefetch_factor: micro-batches that each worker is ahead; None for as many as make up a whole step of the rank,
            and 2 at least, so that loading hides behind computation whatever is accumulated.
        repeat: False: the run ends when it has seen all data once, or an epoch of a ``blend_epochized``.
        skip_steps: steps, counted from 1, whose micro-batches are passed over; the steps take those that follow.
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
