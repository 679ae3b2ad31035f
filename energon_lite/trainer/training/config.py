"""Configuration of a run, as frozen dataclasses. ``config_file.py`` fills them from YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Any

from energon_lite.documents import Node
from energon_lite.errors import ConfigError, UsageError, require, require_at_least
from energon_lite.trainer.data.config import DataConfig
from energon_lite.trainer.models.config import MODEL_MEANING, ModelConfig
from energon_lite.trainer.optimizer.config import OptimizerConfig


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
        share_images: data-parallel ranks encode each other's images, so that all have equal work; useful if the image
            encoder takes a large part of a step and images differ in size or number.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    virtual: int = 1
    order: str = "tp-cp-dp-pp"
    timeout: float | None = None
    share_images: bool = False


def extra(name: str, setting: str) -> Any:
    """Import an extra, a folder of ``energon_lite/extras``, for a setting that needs it.

    Raises:
        UsageError: the extra is missing.
    """
    try:
        return import_module(f"energon_lite.extras.{name}")
    except ModuleNotFoundError:
        fix = f"install energon_lite with energon_lite/extras/{name}"
        raise UsageError(f"{setting} needs the extra {name}", fix=fix) from None


def _seconds(node: Node) -> float:
    """Read a time in seconds: a number, or a text such as ``3h30m``."""
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", str(node.value))
    if not isinstance(node.value, str):
        return node.number()
    if not (match and node.value):
        raise node.wrong("a number of seconds, or a time such as 3h30m")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


@dataclass(frozen=True)
class TrainConfig:
    """Length of a run, and its checkpoints, evaluations, metrics and diagnostics.

    Args:
        steps: optimizer steps of the whole run, resumed parts included.
        save_every: steps between checkpoints; 0 for one at the end only.
        keep: number of newest checkpoints to keep.
        keep_every: in addition, keep the first checkpoint at or after each multiple of this number of steps; 0 for
            none.
        checkpoints: their folder, or its URL, as ``s3://bucket/run``; None for ``output/checkpoints``.
        time_limit: time after which the run must be over, in seconds or as ``3h30m``; it saves and stops before. None
            for no limit.
        async_save: write checkpoints while training continues; otherwise training waits.
        save_timeout: seconds to wait for a checkpoint that is being written when an error ends the run.
        nonfinite_limit: number of consecutive steps with a NaN or infinite loss or gradient after which the run fails.
        spike_factor: a step whose loss exceeds this factor times the median of the losses before it updates nothing,
            see :class:`SpikeGuard`; 0 to apply every update.
        spike_window: number of losses in that median.
        log_every: steps between progress lines when the output is not a terminal.
        eval_every: steps between evaluations; 0 for none.
        eval_at_start: also evaluate before the first step.
        eval_batches: micro-batches of each validation set, summed over all data-parallel ranks; 0 for all of them.
        init_from: source of a new run's weights: a checkpoint, a folder of checkpoints (the newest is used), or a
            Hugging Face model folder. None for random weights. A run that has a checkpoint of its own resumes from
            that.
        init_from_ignore: model settings, such as ``rope_theta``, that may differ from that checkpoint's.
        freeze: name patterns of parameters that are not trained, such as ``vision.*`` or ``layers.[01].*``.
        tensorboard: also write metrics for TensorBoard, into ``output/tensorboard``.
        wandb: also send metrics to Weights & Biases: the arguments of ``wandb.init``, as ``{project: captions}``; None
            to disable.
        prometheus_port: port of this machine that serves the metrics of the last step to Prometheus; None to disable.
        peak_tflops: peak throughput of a device in TFLOP/s, for ``mfu`` in the metrics; None for the maker's figure.
        profile: first and last step of the window in which Chrome traces are recorded, into ``output/profile``.
        measure_costs: interval in steps at which micro-batch times are measured, for the cost model that later runs
            plan by, see ``MicroBatchTimes`` of the extra ``balance``; 0 to disable.
        memory_snapshot: in that window, also record GPU memory allocations by call stack, for pytorch.org/memory_viz.
        gc_every: steps between two runs of Python's garbage collector, at the same steps on all ranks; 0 for Python's
            own schedule.
        flight_recorder: number of recent collectives that NCCL remembers, and writes into ``output`` when one hangs.
        deterministic: only deterministic kernels, and one thread per process: two runs give the same bits. On a GPU
            this excludes the fastest attention, and fills all new memory. None: true without a GPU, false with one.
    """

    steps: int = 100
    save_every: int = 0
    keep: int = 2
    keep_every: int = 0
    checkpoints: str | None = None
    time_limit: Annotated[float | None, _seconds] = None
    async_save: bool = True
    save_timeout: float = 300.0
    nonfinite_limit: int = 3
    spike_factor: float = 0.0
    spike_window: int = 64
    log_every: int = 10
    eval_every: int = 0
    eval_at_start: bool = False
    eval_batches: int = 0
    init_from: str | None = None
    init_from_ignore: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    tensorboard: bool = False
    wandb: Mapping[str, Any] | None = None
    prometheus_port: int | None = None
    peak_tflops: float | None = None
    profile: tuple[int, int] | None = None
    measure_costs: int = 0
    memory_snapshot: bool = False
    gc_every: int = 0
    flight_recorder: int = 0
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        window = self.profile is None or 1 <= self.profile[0] <= self.profile[1]
        require(window, "profile is not a window of steps", "train.profile", "give e.g. [5, 6]")
        peak = self.peak_tflops is None or self.peak_tflops > 0
        require(peak, "peak_tflops is not positive", "train.peak_tflops", "leave it out, or give e.g. 989")
        for name in self.init_from_ignore:
            if name not in MODEL_MEANING:
                what = f"{name!r} is not a setting that decides what weights mean"
                raise ConfigError(what, at="train.init_from_ignore", choices=MODEL_MEANING, suggest_for=name)
        factor = self.spike_factor == 0 or self.spike_factor > 1
        require(factor, "spike_factor is not above 1", "train.spike_factor", "leave it out, or give e.g. 1.5")
        require_at_least(self, "train", steps=1, keep=1, log_every=1, nonfinite_limit=1, spike_window=2)
        require_at_least(self, "train", save_every=0, keep_every=0, eval_every=0, eval_batches=0, save_timeout=0)
        require_at_least(self, "train", gc_every=0, flight_recorder=0, measure_costs=0)
        inside = not self.memory_snapshot or self.profile is not None
        require(inside, "memory_snapshot has no window", "train.memory_snapshot", "give train.profile, e.g. [5, 6]")
        limit = self.time_limit is None or self.time_limit > 0
        require(limit, "time_limit is not positive", "train.time_limit", "leave it out, or give e.g. 3h30m")


@dataclass(frozen=True)
class TrainerConfig:
    """Configuration of a whole run. Equal values give equal runs.

    Args:
        data: the training data; the only section without defaults.
        seed: seed of the initial weights and of the order of samples.
        output: folder for metrics and checkpoints, on this machine; :attr:`TrainConfig.checkpoints` may be elsewhere.
    """

    data: DataConfig
    seed: int = 0
    output: str = "output"
    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        what = f"output is {self.output!r}, and metrics are written to a folder on this machine"
        require("://" not in self.output, what, "output", "give a folder; for checkpoints there: train.checkpoints")
