"""Metrics of a run: the numbers of each step, made when it is finished, for files, monitoring services and terminal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from energon_lite.batching import chain_digest, digest_text
from energon_lite.errors import UsageError, listed
from energon_lite.loading import MetricsSink as MetricsSink
from energon_lite.trainer.data.loaders import StepData
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.training.config import TrainerConfig, config_to_dict, extra
from energon_lite.trainer.training.pipeline import Record
from energon_lite.trainer.training.step import LaunchedStep
from energon_lite.trainer.training.throughput import memory_in_use, peak_flops

logger = logging.getLogger(__name__)


@dataclass
class RunningStep:
    """A step that the device may still be computing.

    Args:
        step: number of the step, from 1.
        data: origin of its micro-batches.
        began: start of the step, by ``time.perf_counter``.
        data_wait: seconds until its micro-batches were available.
        launched: the launched work, with the loss.
        flops: useful operations for this rank's micro-batches, see :func:`batch_flops`.
        more: metrics of its observers, and of the evaluation after it, if there was one.
    """

    step: int
    data: StepData
    began: float
    data_wait: float
    launched: LaunchedStep = field(init=False)
    flops: float = 0.0
    more: dict[str, float] = field(default_factory=dict)

    def sums(self, mesh: ParallelMesh) -> list[float]:
        """Return this rank's numbers to be summed over all ranks for :meth:`StepMetrics.complete`.

        One rank of a model replica counts. The digest is in halves, whose sums over 2**21 ranks are exact in float64.
        """
        counts = mesh.is_first_stage and mesh.rank("cp") == mesh.rank("tp") == 0
        return [self.data.digest >> 32, self.data.digest & 0xFFFFFFFF, self.flops] if counts else [0.0] * 3


class StepMetrics:
    """Maker of the metrics of successive steps.

    Args:
        config: configuration of the run.
        mesh: the ranks.

    Attributes:
        digest: chain of the digests of all completed steps.
    """

    def __init__(self, config: TrainerConfig, mesh: ParallelMesh):
        self.config = config
        self.mesh = mesh
        given = config.train.peak_tflops
        self.peak_flops = given * 1e12 if given else peak_flops(mesh.device)
        self.digest = RunDigest()
        self._ended = 0.0  # end of the last step

    def __call__(self, running: RunningStep) -> dict[str, Any]:
        """Wait for a step, and return its metrics by name, without those of :meth:`complete`."""
        launched, step = running.launched, running.step
        result, ended = launched.result(), launched.ended
        # Steps launched one behind the other: the time of each starts at the end of the previous one.
        seconds, self._ended = ended - max(running.began, self._ended), ended
        values: dict[str, Any] = {
            "step": step,
            **{name: getattr(result, name) for name in ("loss", "grad_norm", "tokens", "lr")},
            **result.more,
            **self.config.optimizer.learning_rates(result.lr),
            "seconds": seconds,
            "data_wait": running.data_wait,
            "tokens_per_second": result.tokens / seconds,
            "memory_gib": memory_in_use(self.mesh.device),
            "micro_batches": running.data.micro_batches,
            "position": running.data.position,
        }
        counts = {"skipped_updates": step - result.updates, "spikes": result.spikes}
        values |= {name: count for name, count in counts.items() if count > 0}
        return values | running.more

    def complete(self, values: dict[str, Any], sums: Sequence[float]) -> None:
        """Add the metrics that depend on all ranks: the digest, also to that of the run, and ``mfu``, if known.

        Args:
            values: metrics of a step.
            sums: sums over all ranks of its :meth:`RunningStep.sums`.
        """
        high, low, flops = sums
        values["digest"] = digest_text((int(high) << 32) + int(low))
        self.digest.add(values["step"], values["digest"])
        if self.peak_flops is not None and flops:
            values["mfu"] = flops / values["seconds"] / (self.peak_flops * self.mesh.world_size)


class RunDigest:
    """Chain of the digests of a run's steps in order: equal chains mean equal steps.

    Attributes:
        first: number of the step before the first one in the chain.
        chain: digest of the steps after it.

    Example:
        >>> digest = RunDigest()
        >>> digest.add(1, "00000000000000ff")
        >>> digest.state()["step"]
        1
    """

    def __init__(self) -> None:
        self.first = self.step = self.chain = 0

    def add(self, step: int, digest: str) -> None:
        """Append a finished step to the chain.

        Args:
            step: number of the step.
            digest: digest of its samples, as in its line of metrics.
        """
        self.step, self.chain = step, chain_digest(self.chain, int(digest, 16))

    def state(self) -> dict[str, Any]:
        """Return the chain for a checkpoint."""
        return {"first": self.first, "step": self.step, "chain": digest_text(self.chain)}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Restore a :meth:`state` after ``step`` steps; from an empty one, the chain begins there."""
        self.first, self.step = state.get("first", step), step
        self.chain = int(state.get("chain", "0"), 16)


class StepObserver(Protocol):
    """Observer of the launch of each step, on all ranks. ``Trainer.observers`` has those of the configuration."""

    def step(
        self, number: int, micro_batches: Sequence[Any], metrics: dict[str, float], /
    ) -> AbstractContextManager[Record | None]:
        """Surround the launch of a step; yields the ``record`` argument of :func:`run_pipeline`, or None.

        Args:
            number: the step, from 1.
            micro_batches: this rank's.
            metrics: metrics of the step, to add to.
        """

    def close(self) -> None:
        """Write what was observed, at the end of the run."""


def make_observers(config: TrainerConfig, mesh: ParallelMesh) -> list[StepObserver]:
    """Make the observers that a run's configuration requests. The first one that records a step's passes gets them.

    Raises:
        UsageError: the extra of an observer is not installed.
    """
    train, output = config.train, config.output
    rows: dict[str, tuple[str, str, tuple[Any, ...]]] = {
        "profile": ("inspect", "ProfileWindow", (train.profile, f"{output}/profile", mesh, train.memory_snapshot)),
        "measure_costs": ("balance", "MicroBatchTimes", (train.measure_costs, output, config.model, mesh)),
    }
    wanted = [(setting, *row) for setting, row in rows.items() if getattr(train, setting)]
    return [getattr(extra(room, f"train.{setting}"), name)(*given) for setting, room, name, given in wanted]


#: Files that a run writes into its folder, and that a new run would overwrite.
_WRITTEN = ("metrics.jsonl", "tensorboard", "wandb-id", "profile", "nccl-trace-rank*")

#: Maker of a sink, called with the last step that counts.
SinkMaker = Callable[[int], MetricsSink]


def make_sinks(config: TrainerConfig, after: int, more: Iterable[SinkMaker] = ()) -> list[MetricsSink]:
    """Make the sinks of a run's configuration, and further ones. They need the extra ``inspect``, but for the progress.

    A run that begins at step 0 overwrites nothing: files of a former run in the folder move to its subfolder
    ``former-1``.

    Args:
        config: configuration of the run.
        after: the last step that counts.
        more: makers of further sinks.

    Raises:
        UsageError: the package or the extra of a sink is not installed, or the port for Prometheus is in use.
    """
    output, train = Path(config.output), config.train
    if after == 0:
        _set_aside(output)
    sinks: list[MetricsSink] = [Progress(train.steps, done=after, every=train.log_every)]
    try:
        sinks.append(extra("inspect", "metrics.jsonl").MetricsFile(output / "metrics.jsonl", after=after))
    except UsageError as error:
        logger.warning("metrics.jsonl is not written: %s", error)
    if train.tensorboard:
        folder = output / "tensorboard"
        sinks.append(extra("inspect", "train.tensorboard").TensorBoardFolder(folder, after=after))
    if train.wandb is not None:
        sinks.append(extra("inspect", "train.wandb").WandbRun(output, train.wandb, config_to_dict(config)))
    if train.prometheus_port is not None:
        sinks.append(extra("inspect", "train.prometheus_port").PrometheusEndpoint(train.prometheus_port))
    return [*sinks, *(make(after) for make in more)]


def _set_aside(output: Path) -> None:
    """Move the files of a former run into a subfolder."""
    there = [path for pattern in _WRITTEN for path in sorted(output.glob(pattern))]
    if left := [path for path in there if path.is_dir() or path.stat().st_size]:
        former = next(place for number in count(1) if not (place := output / f"former-{number}").exists())
        former.mkdir()
        for path in left:
            path.rename(former / path.name)
        logger.warning("begins at step 0; %s of a former run are now in %s", listed([p.name for p in left]), former)


def write(sinks: Iterable[MetricsSink], values: Mapping[str, Any]) -> None:
    """Write the numbers of a step to all sinks."""
    for sink in sinks:
        sink.write(values)


class Progress:
    """Sink that shows a live line on a terminal; elsewhere, it logs a line every ``every`` steps.

    Args:
        total: steps of the run.
        done: number of finished steps.
        every: steps between logged lines.
    """

    def __init__(self, total: int, *, done: int, every: int):
        self._total = total
        self._every = every
        self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, disable=None)  # None: no terminal

    def write(self, values: Mapping[str, Any]) -> None:
        """Report a finished step."""
        step = values["step"]
        shown = {"loss": "loss {:.4f}", "grad_norm": "grad norm {:.3f}", "tokens": "{} tokens"}
        shown |= {"tokens_per_second": "{:.0f}/s", "mfu": "MFU {:.1%}"}
        evaluated = [name for name in values if name.startswith("eval_loss")]  # the names of validation sets follow
        shown |= {name: f"{name.replace('_', ' ', 1)} {{:.4f}}" for name in evaluated}
        text = ", ".join(form.format(values[name]) for name, form in shown.items() if name in values)
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(int(step > 0))  # step 0 is the evaluation before the first
        due = step % self._every == 0 or step == self._total or evaluated
        if self._bar.disable and due:
            logger.info("step %d of %d: %s, %.3f s", step, self._total, text, values.get("seconds", 0.0))

    def close(self) -> None:
        self._bar.close()
