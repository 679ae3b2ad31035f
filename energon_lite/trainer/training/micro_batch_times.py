"""How long micro-batches take, and what is in them: from this a cost model is fitted, for plans of runs to come."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from energon_lite.errors import UsageError
from energon_lite.extras.balance import CostModel, fit_costs, read_micro_batches, write_cost_model
from energon_lite.trainer.models.batch import MultimodalBatch, document_lengths, sizes_of_images
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.training.pipeline_schedule import Action
from energon_lite.trainer.training.throughput import encoder_shape, language_shape

logger = logging.getLogger(__name__)

#: What a run writes into its output folder: a line for each measured step, and at its end the fitted costs.
TIMES_FILE, COSTS_FILE = "micro_batches.jsonl", "costs-{step:06d}.json"


class MicroBatchTimes:
    """Measures every so many-th step: how long the rank computes for each micro-batch, forward and backward.

    The times of all data-parallel ranks, summed over the stages of a pipeline, go into ``micro_batches.jsonl``. On a
    GPU each pass of a measured step is waited for, so that step is slower than others; without one, the time is the
    processor's, without what the rank waited for others. The first step of a process is not measured: it is slower.

    Args:
        every: steps between measured ones; 0: none is.
        output: the run's folder.
        model: its shape.
        mesh: the ranks.

    Example:
        >>> times = MicroBatchTimes(10, "output", config.model, mesh)
        >>> recorder = times.recorder(20)
        >>> launch_step(..., record=recorder)
        >>> times.measured(20, recorder, micro_batches)
        {'rank_balance': 0.93, 'cost_error': 0.04}
    """

    def __init__(self, every: int, output: str | Path, model: ModelConfig, mesh: ParallelMesh):
        self.every, self.path, self.model, self.mesh = every, Path(output) / TIMES_FILE, model, mesh
        self._first, self._costs = True, cost_model_of(model)

    def recorder(self, step: int) -> PassTimes | None:
        """What :func:`run_pipeline` shall report the passes of a step to; None: it is not measured."""
        first, self._first = self._first, False
        return None if first or not self.every or step % self.every else PassTimes(self.mesh.device)

    def measured(
        self, step: int, passes: PassTimes | None, micro_batches: Sequence[MultimodalBatch | None]
    ) -> dict[str, float]:
        """Gather what was measured of a step, and write it. Every rank must call it.

        Returns:
            Metrics of the step, nothing if it was not measured: ``rank_balance``, the mean time of a data-parallel rank
            over that of the slowest; ``cost_error``, the mean relative error of the times that the shape of the model
            predicts, scaled to those of the step.
        """
        if passes is None:
            return {}
        seconds = torch.tensor(passes.seconds(len(micro_batches)), dtype=torch.float64, device=self.mesh.device)
        if (group := self.mesh.group("pp")) is not None:
            dist.all_reduce(seconds, group=group)
        if not self.mesh.is_first_stage:
            return {}
        numbers = [micro_batch_numbers(batch, self.model) for batch in micro_batches if batch is not None]
        mine = [seconds.tolist(), numbers]
        ranks: list[Any] = [mine]
        if (group := self.mesh.group("dp")) is not None:
            ranks = [None] * dist.get_world_size(group)
            dist.all_gather_object(ranks, mine, group=group)
        sums = [sum(times) for times, _ in ranks]
        times = [one for rank_times, _ in ranks for one in rank_times]
        sizes = {name: [one[name] for _, rank in ranks for one in rank] for name in numbers[0]} if numbers else {}
        if not self.mesh.is_main or not max(sums, default=0.0):
            return {}
        about = {"step": step, "place": self._place(), "ranks": len(ranks), "prior": self._costs.by_feature()}
        line = {**about, "seconds": times, "sizes": sizes}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        return {"rank_balance": sum(sums) / len(sums) / max(sums), "cost_error": self._error(sizes, times)}

    def _error(self, sizes: dict[str, list[int]], times: list[float]) -> float:
        found = [
            (cost, one) for cost, one in zip(self._costs.micro_batch_costs(sizes).tolist(), times, strict=True) if one
        ]
        scale = sum(one for _, one in found) / max(1, sum(cost for cost, _ in found))
        return sum(abs(cost * scale / one - 1) for cost, one in found) / len(found)

    def _place(self) -> str:
        """What decides times, beside the model: layout and device."""
        device = torch.cuda.get_device_name(self.mesh.device) if self.mesh.device.type == "cuda" else "cpu"
        return f"{self.mesh} on {device}"

    def finish(self, step: int) -> None:
        """Fit a cost model by all that was measured until a step, and write it into the run's folder.

        No file is written over: a run that plans by it would not be resumed with other costs.
        """
        path = self.path.with_name(COSTS_FILE.format(step=step))
        if not (self.every and self.mesh.is_main and self.path.exists()) or path.exists():
            return
        try:
            fit = fit_costs(*read_micro_batches(self.path))
        except UsageError as error:
            logger.info("no costs are fitted: %s", error)
            return
        about = {"place": self._place(), "model": asdict(self.model)}
        write_cost_model(path, fit, json.loads(json.dumps(about, default=str)))
        logger.info("costs in %s: %s", path, fit)


class PassTimes:
    """The passes of a step, as :func:`run_pipeline` records them; on a processor, in its own time."""

    def __init__(self, device: torch.device):
        self.clock = time.perf_counter if device.type == "cuda" else time.thread_time
        self._passes: list[tuple[int, float]] = []

    def __call__(self, action: Action, began: float, ended: float) -> None:
        self._passes.append((action.micro_batch, ended - began))

    def seconds(self, count: int) -> list[float]:
        """Of each of ``count`` micro-batches; 0 for an empty one."""
        found = [0.0] * count
        for number, seconds in self._passes:
            found[number] += seconds
        return found


def micro_batch_numbers(batch: MultimodalBatch, config: ModelConfig) -> dict[str, int]:
    """What is in a micro-batch, as :meth:`CostModel.micro_batch_costs` takes it. A padded row is one segment.

    Args:
        batch: the micro-batch.
        config: the model's shape.
    """
    rows, length = batch.tokens.shape
    lengths = batch.document_lengths
    if lengths is None:
        lengths = [length] * rows if batch.documents is None else document_lengths(batch.documents.cpu())
    sizes = sizes_of_images(batch.image, batch.image_sizes)
    patches = [(height // config.patch_size) * (width // config.patch_size) for height, width in sizes]
    return {
        "squared_tokens": sum(one**2 for one in lengths),
        "tokens": rows * length,
        "segments": len(lengths),
        "squared_patches": sum(one**2 for one in patches),
        "patches": sum(patches),
        "images": len(patches),
        "loss_tokens": int((batch.loss_mask > 0).sum()),
    }


def cost_model_of(config: ModelConfig) -> CostModel:
    """The cost model that follows from a model's shape."""
    encoder = encoder_shape(config) if config.image_size else None
    return CostModel.of_shape(language_shape(config), encoder)
