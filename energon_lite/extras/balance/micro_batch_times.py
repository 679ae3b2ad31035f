"""Measurement of micro-batch times and sizes, from which a cost model for later plans is fitted."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from energon_lite.errors import UsageError
from energon_lite.extras.balance.cost_fit import TIMES_FILE, fit_costs, read_micro_batches, write_cost_model
from energon_lite.extras.balance.cost_model import CostModel

if TYPE_CHECKING:
    from energon_lite.trainer.models.config import ModelConfig
    from energon_lite.trainer.models.interface import MultimodalBatch
    from energon_lite.trainer.parallel.mesh import ParallelMesh
    from energon_lite.trainer.training.pipeline import Action

logger = logging.getLogger(__name__)

#: File in a run's output folder: the costs fitted at the end of the run.
COSTS_FILE = "costs-{step:06d}.json"


class MicroBatchTimes:
    """Measures, at every ``every``-th step, the seconds a rank computes for each micro-batch, forward and backward.

    The times of all data-parallel ranks, summed over the stages of a pipeline, are written to ``micro_batches.jsonl``.
    On a GPU, a measured step waits for each pass, so it is slower than others. Without a GPU, the time is processor
    time, which excludes waiting for other ranks. The first step of a process is not measured, because it is slower.

    Args:
        every: steps between measured ones.
        output: the run's folder.
        model: the model's shape.
        mesh: the ranks.

    Example:
        >>> times = MicroBatchTimes(10, "output", config.model, mesh)
        >>> with times.step(20, micro_batches, metrics) as record:
        ...     launch_step(..., record=record)
        >>> metrics
        {'rank_balance': 0.93, 'cost_error': 0.04}
    """

    def __init__(self, every: int, output: str | Path, model: ModelConfig, mesh: ParallelMesh):
        self.every = every
        self.path = Path(output) / TIMES_FILE
        self.model = model
        self.mesh = mesh
        self._last = 0  # number of the last step
        self._costs = cost_model_of(model)

    @contextmanager
    def step(
        self, number: int, micro_batches: Sequence[MultimodalBatch | None], metrics: dict[str, float]
    ) -> Iterator[PassTimes | None]:
        """Surround a step; yields the ``record`` argument of :func:`run_pipeline`, or None if it is not measured.

        Args:
            number: the step, from 1.
            micro_batches: this rank's.
            metrics: filled with those of :meth:`measured`.
        """
        first, self._last = not self._last, number
        if first or number % self.every:
            yield None
            return
        yield (passes := PassTimes(self.mesh.device))
        metrics |= self.measured(number, passes, micro_batches)

    def measured(
        self, step: int, passes: PassTimes, micro_batches: Sequence[MultimodalBatch | None]
    ) -> dict[str, float]:
        """Gather the measurements of a step from all ranks, and write them. Every rank must call it.

        Returns:
            Metrics of the step, on the main rank. ``rank_balance`` is the mean time of a data-parallel rank
            divided by that of the slowest; ``cost_error`` is the mean relative error of the times predicted from the
            model's shape, scaled to the total of the step.
        """
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
        times = [value for rank_times, _ in ranks for value in rank_times]
        sizes = {name: [counts[name] for _, rank in ranks for counts in rank] for name in numbers[0]} if numbers else {}
        if not self.mesh.is_main or not max(sums, default=0.0):
            return {}
        about = {"step": step, "place": self._place(), "ranks": len(ranks), "prior": self._costs.by_feature()}
        line = {**about, "seconds": times, "sizes": sizes}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        return {"rank_balance": sum(sums) / len(sums) / max(sums), "cost_error": self._error(sizes, times)}

    def _error(self, sizes: dict[str, list[int]], times: list[float]) -> float:
        costs = self._costs.micro_batch_costs(sizes).tolist()
        measured = [(cost, seconds) for cost, seconds in zip(costs, times, strict=True) if seconds]
        scale = sum(seconds for _, seconds in measured) / max(1, sum(cost for cost, _ in measured))
        return sum(abs(cost * scale / seconds - 1) for cost, seconds in measured) / len(measured)

    def _place(self) -> str:
        """Return the circumstances of a time other than the model: layout and device."""
        device = torch.cuda.get_device_name(self.mesh.device) if self.mesh.device.type == "cuda" else "cpu"
        return f"{self.mesh} on {device}"

    def close(self) -> None:
        """Fit a cost model to the measurements up to the last step, and write it into the run's folder.

        An existing file is kept: a run that plans by it could not be resumed with other costs.
        """
        path = self.path.with_name(COSTS_FILE.format(step=self._last))
        if not (self.mesh.is_main and self._last and self.path.exists()) or path.exists():
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
    """Recorder of the passes of a step for :func:`run_pipeline`; without a GPU, in processor time."""

    def __init__(self, device: torch.device):
        self.clock = time.perf_counter if device.type == "cuda" else time.thread_time
        self._passes: list[tuple[int, float]] = []

    def __call__(self, action: Action, began: float, ended: float) -> None:
        self._passes.append((action.micro_batch, ended - began))

    def seconds(self, count: int) -> list[float]:
        """Return the seconds of each of ``count`` micro-batches; 0 for an empty one."""
        totals = [0.0] * count
        for number, seconds in self._passes:
            totals[number] += seconds
        return totals


def micro_batch_numbers(batch: MultimodalBatch, config: ModelConfig) -> dict[str, int]:
    """Count the contents of a micro-batch for :meth:`CostModel.micro_batch_costs`. A padded row is one segment.

    Args:
        batch: the micro-batch.
        config: the model's shape.
    """
    from energon_lite.trainer.models.interface import sizes_of_images

    rows, length = batch.tokens.shape
    lengths = batch.known_lengths() or [length] * rows
    sizes = sizes_of_images(batch.image, batch.image_sizes)
    patches = [(height // config.patch_size) * (width // config.patch_size) for height, width in sizes]
    return {
        "squared_tokens": sum(tokens**2 for tokens in lengths),
        "tokens": rows * length,
        "segments": len(lengths),
        "squared_patches": sum(number**2 for number in patches),
        "patches": sum(patches),
        "images": len(patches),
        "loss_tokens": int((batch.loss_mask > 0).sum()),
    }


def cost_model_of(config: ModelConfig) -> CostModel:
    """Return the cost model that follows from a model's shape."""
    from energon_lite.trainer.training.throughput import encoder_shape, language_shape

    encoder = encoder_shape(config) if config.image_size else None
    return CostModel.of_shape(language_shape(config), encoder)
