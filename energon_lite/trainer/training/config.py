"""What a run can be told, as frozen dataclasses. ``config_file.py`` fills them from YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from energon_lite.errors import ConfigError, require
from energon_lite.trainer.optimizer.config import OptimizerConfig

#: What a model may compute in.
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
#: Settings of a model that decide what its weights mean. (The others are how it is computed or begun, or show in the
#: shapes of its weights.)
MODEL_MEANING = (
    *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_size", "vocab_size", "rope_theta", "rope_scaling"),
    *("norm_eps", "tie_embeddings", "norm", "image_size", "patch_size"),
)


def require_at_least(settings: object, section: str, **least: float) -> None:
    """Refuse settings, those that are not None, that are below a number each.

    Raises:
        ConfigError: the first that is.
    """
    for name, number in least.items():
        value = getattr(settings, name)
        what = f"{name} is negative" if number == 0 else f"{name} is below {number}"
        require(value is None or value >= number, what, f"{section}.{name}", f"give a number >= {number}")


@dataclass(frozen=True)
class DataConfig:
    """Where the samples come from, and how many go into a step.

    Args:
        path: a prepared folder or a metadataset YAML; its ``train`` split is trained on.
        val_path: likewise, for the ``val`` split; None to evaluate on that of ``path``.
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
        prefetch_factor: micro-batches that each worker is ahead; None for as many as make up a whole step of the rank,
            and 2 at least, so that loading hides behind computation whatever is accumulated.
        skip_steps: steps, counted from 1, whose micro-batches are passed over; the steps take those that follow.
    """

    path: str
    val_path: str | None = None
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
    prefetch_factor: int | None = None
    skip_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        known = self.share in ("load", "broadcast")
        require(known, f"unknown way to share {self.share!r}", "data.share", "use one of: load, broadcast")
        require_at_least(self, "data", micro_batch_size=1, micro_batches_per_step=1, max_length=1)
        require_at_least(self, "data", workers=0, prefetch_factor=1)
        counted = all(step >= 1 for step in self.skip_steps)
        require(counted, "a step is below 1", "data.skip_steps", "steps are counted from 1; give e.g. [7, 8]")


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the parallel axes; data parallelism takes the ranks they leave. See :func:`build_mesh`.

    Args:
        tp: parts of each weight matrix.
        pp: pipeline stages.
        cp: parts of each row of tokens.
        sequence_parallel: with ``tp``, cut activations between blocks along the sequence.
        virtual: chunks of layers of each pipeline stage.
        order: the axes, the fastest varying first; those of size 1 may be left out.
        timeout: seconds that a collective may take before it is an error; None for torch's default.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    virtual: int = 1
    order: str = "tp-cp-dp-pp"
    timeout: float | None = None


@dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies for longer rows, by Llama 3.1's rule; see :func:`scaled_frequencies`.

    Args:
        factor: how much the slowest waves are stretched.
        low_frequency: a wave that turns less often than this in the old context is stretched by the whole factor.
        high_frequency: one that turns more often than this is kept.
        original_length: the old context, in tokens.
    """

    factor: float = 8.0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        at = "model.rope_scaling"
        require(self.factor >= 1, f"factor={self.factor} would shrink rows", f"{at}.factor", "give a number >= 1")
        good = 0 < self.low_frequency < self.high_frequency
        require(good, "low_frequency is not below high_frequency", f"{at}.low_frequency", "e.g. 1 and 4")
        require_at_least(self, at, original_length=1)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model: a Llama decoder and, with ``image_size``, an image prefix.

    Args:
        hidden_size: width of the residual stream.
        num_layers: number of decoder blocks.
        num_heads: query heads; ``hidden_size / num_heads`` is the width of a head.
        num_kv_heads: key and value heads, each shared by ``num_heads / num_kv_heads`` query heads; None for one each.
        ffn_size: inner width of the feed-forward part.
        vocab_size: number of tokens.
        vocab_multiple: the embedding table is padded to a multiple of this, so that it can be cut evenly.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how they are changed for longer rows; None for not at all.
        norm_eps: added to the mean square in RMSNorm.
        tie_embeddings: use the embedding table as the output layer too.
        image_size: height and width of the images, in pixels; 0 for a model without images.
        patch_size: height and width of a patch, in pixels; each patch becomes one prefix token.
        init_std: standard deviation of the initial weights.
        dtype: ``float32``, ``float64`` or ``bfloat16``.
        norm, attention: names of a norm and of an attention function (:func:`register_norm`,
            :func:`register_attention`); there are ``rms_norm``, and ``sdpa``, ``varlen`` and ``flex``.
        recompute: what is not kept for the backward pass but computed again: ``none``, ``selective`` (what grows with
            the square of a row's length, in attention; Korthikanti et al., arXiv:2205.05198) or ``full`` (all but the
            input of each block; Chen et al., arXiv:1604.06174).
        compile: compile each block with ``torch.compile``.
        fuse_projections: queries, keys and values as one matrix product, and gate and up as one.
        loss_chunk: tokens whose logits exist at a time; 0: all of a micro-batch.
    """

    hidden_size: int = 96
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int | None = None
    ffn_size: int = 256
    vocab_size: int = 259
    vocab_multiple: int = 64
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    image_size: int = 0
    patch_size: int = 2
    init_std: float = 0.02
    dtype: str = "float32"
    norm: str = "rms_norm"
    attention: str = "sdpa"
    recompute: str = "none"
    compile: bool = False
    fuse_projections: bool = False
    loss_chunk: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, "model", hidden_size=1, num_layers=1, num_heads=1, ffn_size=1, vocab_size=1)
        require_at_least(self, "model", vocab_multiple=1, patch_size=1, loss_chunk=0)
        known = self.dtype in DTYPES
        require(known, f"unknown dtype {self.dtype!r}", "model.dtype", f"use one of: {', '.join(DTYPES)}")
        if self.recompute not in (choices := ("none", "selective", "full")):
            what = f"cannot recompute {self.recompute!r}"
            raise ConfigError(what, at="model.recompute", choices=choices, suggest_for=self.recompute)
        even = self.hidden_size % (2 * self.num_heads) == 0
        what = f"hidden_size={self.hidden_size} does not give {self.num_heads} heads of an even width"
        require(even, what, "model.hidden_size", f"use a multiple of {2 * self.num_heads}")
        shared = self.kv_heads >= 1 and self.num_heads % self.kv_heads == 0
        what = f"{self.num_heads} query heads cannot share {self.kv_heads} key heads evenly"
        require(shared, what, "model.num_kv_heads", f"use a divisor of {self.num_heads}")
        whole = self.image_size >= 0 and self.image_size % self.patch_size == 0
        what = f"an image of {self.image_size} pixels cannot be cut into patches of {self.patch_size}"
        require(whole, what, "model.patch_size", "use a divisor of image_size")

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def prefix_length(self) -> int:
        """Number of prefix tokens that an image becomes."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table. Not a function of the layout, so that checkpoints fit every layout."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class TrainConfig:
    """How long, and what to do on the way.

    Args:
        steps: optimizer steps of the whole run, resumed parts included.
        save_every: steps between checkpoints; 0 for one at the end only.
        keep: number of checkpoints that are kept, the newest.
        async_save: write checkpoints while training goes on; otherwise it waits.
        save_timeout: seconds that a run which an error ends waits for the checkpoint that is being written.
        nonfinite_limit: steps in a row whose loss or gradient is not finite after which the run ends with an error.
        log_every: steps between progress lines when the output is not a terminal.
        eval_every: steps between evaluations; 0 for none.
        init_from: a checkpoint, or a folder of checkpoints, of which the newest is meant: a new run begins with its
            weights. None for random ones. A run that has a checkpoint of its own goes on from that.
        init_from_ignore: settings of the model, as ``rope_theta``, that may be other ones than that checkpoint's.
        freeze: patterns of names of parameters that are not trained, as ``vision.*`` or ``layers.[01].*``.
        tensorboard: also write metrics for TensorBoard, into ``output/tensorboard``.
        peak_tflops: what a device can do at most, for ``mfu`` in the metrics; None for what its maker states.
        profile: first and last step of a window in which Chrome traces are taken, into ``output/profile``.
        deterministic: only deterministic kernels, and one thread per process: two runs give the same bits.
    """

    steps: int = 100
    save_every: int = 0
    keep: int = 2
    async_save: bool = True
    save_timeout: float = 300.0
    nonfinite_limit: int = 3
    log_every: int = 10
    eval_every: int = 0
    init_from: str | None = None
    init_from_ignore: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    tensorboard: bool = False
    peak_tflops: float | None = None
    profile: tuple[int, int] | None = None
    deterministic: bool = True

    def __post_init__(self) -> None:
        window = self.profile is None or 1 <= self.profile[0] <= self.profile[1]
        require(window, "profile is no window of steps", "train.profile", "give e.g. [5, 6]")
        peak = self.peak_tflops is None or self.peak_tflops > 0
        require(peak, "peak_tflops is not positive", "train.peak_tflops", "leave it out, or give e.g. 989")
        for name in self.init_from_ignore:
            if name not in MODEL_MEANING:
                what = f"{name!r} is no setting that decides what weights mean"
                raise ConfigError(what, at="train.init_from_ignore", choices=MODEL_MEANING, suggest_for=name)
        require_at_least(self, "train", steps=1, keep=1, log_every=1, nonfinite_limit=1)
        require_at_least(self, "train", save_every=0, eval_every=0, save_timeout=0)


@dataclass(frozen=True)
class TrainerConfig:
    """A whole run. The same values give the same run.

    Args:
        data: what is trained on; the only section without defaults.
        seed: of the initial weights and of the order of samples.
        output: folder for metrics and checkpoints.
    """

    data: DataConfig
    seed: int = 0
    output: str = "output"
    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
