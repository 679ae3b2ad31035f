"""The training loop: fetch, step, report, evaluate, save; and resume from the last checkpoint."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from torch import nn

from energon_lite import TaskEncoder
from energon_lite.errors import StateError, TopologyError, UsageError, listed
from energon_lite.trainer.checkpointing.checkpoint import CheckpointSaver, find_checkpoint, load_checkpoint
from energon_lite.trainer.checkpointing.files import Place
from energon_lite.trainer.data.loaders import RunData
from energon_lite.trainer.data.rows import RowsTaskEncoder
from energon_lite.trainer.models.interface import Loss, MakeModel, MultimodalBatch, TrainingBatch
from energon_lite.trainer.models.llama import LlamaModel, language_loss
from energon_lite.trainer.optimizer.config import scaled_learning_rate
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import ParallelMesh, build_mesh
from energon_lite.trainer.parallel.parameters import freeze
from energon_lite.trainer.training.config import TrainerConfig, changes, config_to_dict
from energon_lite.trainer.training.guards import NonFiniteGuard, SpikeGuard, is_finite
from energon_lite.trainer.training.language_model import check_model, language_model
from energon_lite.trainer.training.metrics import (
    MetricsSink,
    RunningStep,
    SinkMaker,
    StepMetrics,
    make_observers,
    make_sinks,
    write,
)
from energon_lite.trainer.training.process import Requests, prepare_attention, prepare_process
from energon_lite.trainer.training.step import StepResult, evaluate_each, launch_step
from energon_lite.trainer.training.throughput import batch_flops

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)
B = TypeVar("B", bound=TrainingBatch)
#: Function that is called with the trainer and the metrics of a step or an evaluation.
Hook = Callable[["Trainer", dict[str, Any]], None]


class Trainer:
    """A run: model, optimizer and loaders made from a configuration, and the training loop.

    All files of a run are under ``config.output``: ``metrics.jsonl`` (a line per step) and ``checkpoints/``. If there
    is a checkpoint, :meth:`run` resumes from it, in whatever layout it was saved. If checkpoints exist and none is
    complete, the constructor raises an error.

    Args:
        config: configuration of the run.
        make_model: maker of the model, which then also reads ``train.init_from`` if that is given; None for the
            :func:`language_model` of ``config.model``.
        loss: its loss; None for the :func:`language_loss`.
        metrics: names of the further sums of the loss that the run reports.
        task_encoder: maker of the batches of that loss; None for the rows of ``data.task_encoder``.
        on_step: called on all ranks with the trainer and the metrics of each finished step, which it may change. The
            next step may be running already.
        on_eval: called on all ranks with the trainer and the metrics of each evaluation, which it may add to.
        sinks: makers of further sinks, see :class:`MetricsSink`. They are called on the main rank when the run begins,
            each with the last step that counts.

    Raises:
        TopologyError: the layout does not fit the ranks, the model or the micro-batches of a step.

    Example:
        >>> with Trainer(load_config("run.yaml")) as trainer:
        ...     trainer.run()
        100
    """

    def __init__(
        self,
        config: TrainerConfig,
        *,
        make_model: MakeModel[TrainerConfig, M] | None = None,
        loss: Loss[M, B] | None = None,
        metrics: Sequence[str] = (),
        task_encoder: TaskEncoder | None = None,
        on_step: Hook | None = None,
        on_eval: Hook | None = None,
        sinks: Sequence[SinkMaker] = (),
    ):
        self.config = config
        self.on_step, self.on_eval, self.sinks = on_step, on_eval, sinks
        data = config.data
        train = config.train
        prepare_process(config)
        self.mesh = build_mesh(**vars(config.mesh))
        prepare_attention(config, self.mesh.device, visible=self.mesh.is_main)
        self.checkpoints = train.checkpoints or f"{config.output}/checkpoints"
        self._newest = find_checkpoint(self.checkpoints, self.mesh)
        resumes = self._newest is not None
        self.model: nn.Module = (
            language_model(config, self.mesh, resumes=resumes) if make_model is None else make_model(config, self.mesh)
        )
        if self._newest is not None and isinstance(self.model, LlamaModel):
            fix = "resume with the settings of the checkpoint; for another model, begin a run in another output:"
            check_model(self._newest, config.model, f"{fix} train.init_from={self._newest}")
        self.loss: Loss[Any, Any] = loss or language_loss
        self.metrics = metrics
        self._check_support()
        freeze(self.model, train.freeze, self.mesh)
        self.optimizer = OverlappedDistributedOptimizer(self.model, self.mesh, config.optimizer)
        limit = train.eval_batches if train.eval_every or train.eval_at_start else None
        if task_encoder is not None and self.loss is language_loss:
            task_encoder = RowsTaskEncoder(task_encoder, config.model)
        parts = data, config.model, self.mesh, task_encoder
        self.data = RunData(*parts, seed=config.seed, eval_batches=limit)
        self.loader = self.data.train_loader
        keep = {"keep": train.keep, "keep_every": train.keep_every}
        self.saver = CheckpointSaver(self.checkpoints, self.mesh, **keep, timeout=train.save_timeout)
        self.requests = Requests(train.time_limit, self.mesh)
        self.spikes = SpikeGuard(train.spike_factor, train.spike_window, self.mesh) if train.spike_factor else None
        self.guard = NonFiniteGuard(self.model, self.optimizer, self.mesh, train.nonfinite_limit, data.skip_steps)
        self.guards = {"nonfinite": self.guard} | ({} if self.spikes is None else {"spikes": self.spikes})
        self.observers = make_observers(config, self.mesh)
        self.numbers = StepMetrics(config, self.mesh)

    def _check_support(self) -> None:
        """Refuse settings that the model or the loss does not support."""
        built_in = isinstance(self.model, LlamaModel) and self.loss is language_loss
        sharded = getattr(self.model, "mesh", None) is self.mesh
        supported = {"tp": sharded, "cp": sharded, "pp": built_in, "share_images": built_in}
        for name in (name for name, good in supported.items() if not good):
            if (value := getattr(self.config.mesh, name)) > 1 or value is True:
                what = f"mesh.{name}={value}, which the model or the loss of this run does not support"
                fix = f"leave out mesh.{name}; for tp and cp, shard the model, and keep the mesh as its attribute mesh"
                raise TopologyError(what, fix=fix)
        if taken := [name for name in self.metrics if name in StepResult.__dataclass_fields__]:
            raise UsageError(
                f"the run itself reports {listed(taken)}", fix="give these metrics of the loss other names"
            )
        if self.config.train.measure_costs and not built_in:
            raise UsageError("the costs of another model are not known", fix="leave out train.measure_costs")

    def run(self) -> int:
        """Train until the last step, the end of the data, or a request to stop; save a checkpoint at the end.

        Requests to stop are SIGTERM, SIGUSR1 and ``train.time_limit``, on any rank. SIGUSR2 requests a checkpoint only.

        Returns:
            The number of steps that are done.

        Raises:
            NonFiniteError: on all ranks: weights are NaN or infinite, or too many consecutive steps were.
        """
        train, done = self.config.train, self.resume()
        with ExitStack() as stack:
            stack.enter_context(self.requests.listening())
            stack.push(self._finish_saving)
            sinks = make_sinks(self.config, done, self.sinks) if self.mesh.is_main else []
            for sink in sinks:
                stack.callback(sink.close)
            if done == 0 and train.eval_at_start:
                write(sinks, self._evaluated(0))
            batches = iter(self.loader)
            running = deque[RunningStep]()
            saved = done
            stopped_by, save = "", False
            while done < train.steps and not stopped_by:
                try:
                    running.append(self.launch(done + 1, batches))
                except StopIteration:
                    stopped_by = "the end of the data"
                    break
                done += 1
                save = save or _due(done, train.save_every)
                # The numbers of a step are read after the next one is launched, so that the device stays busy.
                stopped_by, asked, bad = self._report(running, sinks, leave=0 if save else 1)
                if save and not bad:  # a bad step delays the checkpoint until after a good one
                    self.save(done)
                    saved, save = done, False
                save = save or asked
            self._report(running, sinks)
            if done > saved:
                self.save(done)
            self.saver.finish()
            if stopped_by and self.mesh.is_main:
                logger.info("stopped after step %d of %d by %s", done, train.steps, stopped_by)
        return done

    def step(self, step: int, batches: Iterator[Any]) -> dict[str, Any]:
        """Run a step by :meth:`launch`, wait for it, and return its metrics, without ``digest`` and ``mfu``."""
        return self.numbers(self.launch(step, batches))

    def launch(self, step: int, batches: Iterator[Any]) -> RunningStep:
        """Launch one optimizer step on the device, and the evaluation if it is due. Every rank must call it.

        Args:
            step: number of the step, from 1.
            batches: this rank's micro-batches.

        Raises:
            StopIteration: on all ranks: the data has ended.
        """
        train, began = self.config.train, time.perf_counter()
        if not (micro_batches := self.data.take_step(batches)):
            raise StopIteration
        running = RunningStep(step, self.data.last_step, began, time.perf_counter() - began)
        lr = partial(scaled_learning_rate, step - 1, train.steps, self.config.optimizer)
        parts = self.model, self.optimizer, micro_batches, self.mesh
        how: dict[str, Any] = {"lr": lr, "loss": self.loss, "metrics": self.metrics, "spikes": self.spikes}
        with ExitStack() as stack:
            observed = step, micro_batches, running.more
            records = [stack.enter_context(observer.step(*observed)) for observer in self.observers]
            running.launched = launch_step(*parts, record=next(filter(None, records), None), **how)
        if self.loss is language_loss:
            rows = [batch for batch in micro_batches if isinstance(batch, MultimodalBatch)]
            running.flops = sum(batch_flops(self.config.model, batch) for batch in rows)
        if _due(step, train.eval_every):
            running.launched.result()  # the evaluation does not count in the step's time
            running.more |= self._evaluated(step)
        return running

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of each validation set. Every rank must call it."""
        return evaluate_each(self.model, self.data.validation(), self.mesh, self.loss, self.metrics)

    def _evaluated(self, step: int) -> dict[str, float]:
        """Evaluate after a step, and call ``on_eval``."""
        values = {"step": step, **self.evaluate()}
        if self.on_eval is not None:
            self.on_eval(self, values)
        return values

    def _report(
        self, running: deque[RunningStep], sinks: Iterable[MetricsSink], *, leave: int = 0
    ) -> tuple[str, bool, bool]:
        """Wait for all but ``leave`` running steps, write their metrics, and agree on what to do next.

        Returns:
            The reason to stop, or an empty text; whether a checkpoint was requested; whether the last of these steps
            was bad.
        """
        ended = [running.popleft() for _ in range(len(running) - leave)]
        lines = [self.numbers(step) for step in ended]
        # Signals arrive at different times; all ranks must take the same branch.
        are_bad = [not is_finite(values) for values in lines]
        sums = [number for step in ended for number in step.sums(self.mesh)]
        stop, save, bad, sums = self.requests.agreed(*are_bad, sums=sums, seconds_to_save=self.saver.seconds_written)
        for number, values in enumerate(lines):
            self.numbers.complete(values, sums[3 * number : 3 * number + 3])
            if self.on_step is not None:
                self.on_step(self, values)
            write(sinks, values)
        for step, values, is_bad in zip(ended, lines, bad, strict=True):
            for guard in self.guards.values():
                guard.saw(values, step.data, is_bad=is_bad)
        return stop, save, bool(bad and bad[-1])

    def save(self, step: int) -> Place:
        """Start to write a checkpoint after ``step`` steps; :meth:`close` waits for it. Every rank must call it.

        While steps are not finite, no older checkpoint is removed.

        Raises:
            NonFiniteError: weights or moments are not finite; nothing is written.
        """
        self.guard.check_state(step)
        place = self.saver.save(step, self.model, self.optimizer, self.state(), prune=not self.guard.in_a_row)
        if not self.config.train.async_save:
            self.saver.finish()
        return place

    def state(self) -> dict[str, Any]:
        """Return the state of the run other than tensors, for :func:`save_checkpoint`. Every rank must call it."""
        return {
            "loader": self.loader.save_state_rank(),
            "config": config_to_dict(self.config),
            "digest": self.numbers.digest.state(),
            **{name: guard.state() for name, guard in self.guards.items()},
        }

    def resume(self) -> int:
        """Resume from the newest checkpoint, if there is one. Every rank must call it.

        Returns:
            The number of steps that are done.

        Raises:
            StateError: checkpoints exist and none of them is complete.
        """
        path, self._newest = self._newest or find_checkpoint(self.checkpoints, self.mesh), None
        if path is None:
            if self.mesh.is_main:
                logger.info("begins at step 0: there is no checkpoint in %s", self.checkpoints)
            self.guard.check_state(0, read=self.config.train.init_from)
            return 0
        step, state = load_checkpoint(path, self.model, self.mesh, self.optimizer)
        self.guard.check_state(step, read=path)
        self.loader.restore_state_rank(state["loader"])
        self.numbers.digest.restore(state.get("digest") or {}, step)
        for name, guard in self.guards.items():
            guard.restore(state.get(name) or {})
        if self.mesh.is_main:
            logger.info("resumed from %s", path)
            for change in changes(state["config"], config_to_dict(self.config)):
                logger.warning("resumed with another setting: %s", change)
        return step

    def close(self) -> None:
        """Close the run: finish the checkpoint, the loaders' workers and the process group.

        A checkpoint that is being written may take ``train.save_timeout``. The process group is left on ranks that
        torchrun started.

        Raises:
            StateError: the checkpoint could not be written, or not in time.
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with ExitStack() as stack:  # an error in one, even a second Ctrl-C, does not keep the rest open
            stack.callback(self.mesh.close)
            for observer in self.observers:
                stack.callback(observer.close)
            stack.callback(self.data.close)
            closing = stack.enter_context(self.requests.listening())
            self._finish_saving(kind, error, trace)
        if "SIGTERM" in closing and error is None:
            os.kill(os.getpid(), signal.SIGTERM)  # it was deferred while the checkpoint was written

    def _finish_saving(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the checkpoint that is being written. Its failure does not hide an earlier error."""
        try:
            self.saver.close()
        except StateError as lost:
            if error is None:
                raise
            logger.error("%s", lost)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def training_dataset(config: TrainerConfig) -> Any:
    """Return the training data set of a run, in one process without a process group: its plan is equal on any ranks.

    Example:
        >>> sample_history(training_dataset(load_config("run.yaml")), leaf=0, index=7)
    """
    data = RunData(config.data, config.model, ParallelMesh(), seed=config.seed, eval_batches=None)
    with data.train_loader as loader:
        return loader.dataset
