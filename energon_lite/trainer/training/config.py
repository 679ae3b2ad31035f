"""What a run can be told, as frozen dataclasses. ``config_file.py`` fills them from YAML."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    virtual: int = 1
    order: str = "tp-cp-dp-pp"
    timeout: float | None = None


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
