"""What a run can be told, as frozen dataclasses. ``config_file.py`` fills them from YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from energon_lite.documents import Node
from energon_lite.errors import ConfigError, require, require_at_least
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
        share_images: data-parallel ranks encode each other's images, so that each has as much to do; where the image
            encoder takes much of a step and images differ in size or number.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    virtual: int = 1
    order: str = "tp-cp-dp-pp"
    timeout: float | None = None
    share_images: bool = False


def _seconds(node: Node) -> float:
    """A time: a number of seconds, or as 3h30m."""
    found = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", str(node.value))
    if not isinstance(node.value, str):
        return node.number()
    if not (found and node.value):
        raise node.wrong("a number of seconds, or a time such as 3h30m")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


@dataclass(frozen=True)
class TrainConfig:
    """How long, and what to do on the way.

    Args:
        steps: optimizer steps of the whole run, resumed parts included.
        save_every: steps between checkpoints; 0 for one at the end only.
        keep: number of checkpoints that are kept, the newest.
        keep_every: beside these, the first checkpoint at or after each multiple of so many steps stays; 0 for none.
        checkpoints: their folder, or its URL, as ``s3://bucket/run``; None for ``output/checkpoints``.
        time_limit: seconds, or as ``3h30m``, after which the run is over: it saves and stops in time. None for none.
        async_save: write checkpoints while training goes on; otherwise it waits.
        save_timeout: seconds that a run which an error ends waits for the checkpoint that is being written.
        nonfinite_limit: steps in a row whose loss or gradient is not finite after which the run ends with an error.
        spike_factor: a step whose loss is more than so many times the median of those before it updates nothing, see
            :class:`SpikeGuard`; 0: whatever its loss is, it does.
        spike_window: how many losses these are.
        log_every: steps between progress lines when the output is not a terminal.
        eval_every: steps between evaluations; 0 for none.
        eval_at_start: also evaluate before the first step.
        eval_batches: micro-batches of each validation set, over all data-parallel ranks together; 0 for all of them.
        init_from: a checkpoint, a folder of checkpoints, of which the newest is meant, or a model's folder of Hugging
            Face: a new run begins with its weights. None for random ones. A run that has a checkpoint of its own goes
            on from that.
        init_from_ignore: settings of the model, as ``rope_theta``, that may be other ones than that checkpoint's.
        freeze: patterns of names of parameters that are not trained, as ``vision.*`` or ``layers.[01].*``.
        tensorboard: also write metrics for TensorBoard, into ``output/tensorboard``.
        wandb: also send metrics to Weights & Biases: what ``wandb.init`` takes, as ``{project: captions}``; None: not.
        prometheus_port: at this port of this machine Prometheus finds the metrics of the last step; None: nowhere.
        peak_tflops: what a device can do at most, for ``mfu`` in the metrics; None for what its maker states.
        profile: first and last step of a window in which Chrome traces are taken, into ``output/profile``.
        measure_costs: steps between two whose micro-batches are measured, for the costs by which later runs plan, see
            :class:`MicroBatchTimes`; 0: none is.
        memory_snapshot: in that window, also record who has what memory of the GPU, for pytorch.org/memory_viz.
        gc_every: steps between two searches for Python's garbage, at the same steps on all ranks; 0: whenever it likes.
        flight_recorder: how many of the last collectives NCCL remembers, and writes into ``output`` when one hangs.
        deterministic: only deterministic kernels, and one thread per process: two runs give the same bits. On a GPU it
            rules out the fastest attention, and fills all new memory. None: true without a GPU, false with one.
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
        require(window, "profile is no window of steps", "train.profile", "give e.g. [5, 6]")
        peak = self.peak_tflops is None or self.peak_tflops > 0
        require(peak, "peak_tflops is not positive", "train.peak_tflops", "leave it out, or give e.g. 989")
        for name in self.init_from_ignore:
            if name not in MODEL_MEANING:
                what = f"{name!r} is no setting that decides what weights mean"
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
    """A whole run. The same values give the same run.

    Args:
        data: what is trained on; the only section without defaults.
        seed: of the initial weights and of the order of samples.
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
