"""A running step, and its line of metrics when it is finished."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from energon_lite.batching import digest_text
from energon_lite.trainer.data.loaders import StepData
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.training.config import TrainerConfig
from energon_lite.trainer.training.step import LaunchedStep
from energon_lite.trainer.training.throughput import memory_in_use, peak_flops, training_flops


@dataclass
class RunningStep:
    """A step that the device may still be computing.

    Args:
        step: number of the step, from 1.
        data: origin of its micro-batches.
        began: start of the step, by ``time.perf_counter``.
        data_wait: seconds until its micro-batches were available.
        launched: the launched work, with the loss.
        evaluation: metrics of the evaluation after it, if there was one.
        measured: metrics of its micro-batches, if these were measured.
    """

    step: int
    data: StepData
    began: float
    data_wait: float
    launched: LaunchedStep = field(init=False)
    evaluation: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)


class StepMetrics:
    """Maker of the metrics of successive steps.

    Args:
        config: configuration of the run.
        mesh: the ranks.
    """

    def __init__(self, config: TrainerConfig, mesh: ParallelMesh):
        self.config = config
        self.mesh = mesh
        given = config.train.peak_tflops
        self.peak_flops = given * 1e12 if given else peak_flops(mesh.device)
        self._ended = 0.0  # end of the last step

    def __call__(self, running: RunningStep) -> dict[str, Any]:
        """Wait for a step, and return its metrics by name."""
        launched, step = running.launched, running.step
        result, ended = launched.result(), launched.ended
        # Steps launched one behind the other: the time of each starts at the end of the previous one.
        seconds, self._ended = ended - max(running.began, self._ended), ended
        values: dict[str, Any] = {
            "step": step,
            **vars(result),
            **self.config.optimizer.learning_rates(result.lr),
            "seconds": seconds,
            "data_wait": running.data_wait,
            "tokens_per_second": result.tokens / seconds,
            "memory_gib": memory_in_use(self.mesh.device),
            "digest": digest_text(launched.digest()),
            "micro_batches": running.data.micro_batches,
            "position": running.data.position,
        }
        if (skipped := step - launched.updates()) > 0:
            values["skipped_updates"] = skipped
        if (spikes := launched.spikes()) > 0:
            values["spikes"] = spikes
        if self.peak_flops is not None:
            positions, pairs, images = launched.work()
            needed = training_flops(self.config.model, positions, pairs) + images
            values["mfu"] = needed / seconds / (self.peak_flops * self.mesh.world_size)
        return values | running.measured | running.evaluation
