"""The training loop: fetch, step, report, evaluate, save; and resume from where the last run got to."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from energon_lite.errors import StateError
from energon_lite.trainer.checkpointing.checkpoint import CheckpointSaver, Place, find_checkpoint, load_checkpoint
from energon_lite.trainer.data.loaders import RunData
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.optimizer.learning_rates import scaled_learning_rate
from energon_lite.trainer.optimizer.plain_optimizer import make_optimizer
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.parallel.parameters import freeze
from energon_lite.trainer.training.config import TrainerConfig
from energon_lite.trainer.training.config_file import config_to_dict
from energon_lite.trainer.training.metrics import MetricsFile, Progress, TensorBoardFolder
from energon_lite.trainer.training.nonfinite import NonFiniteGuard, is_finite
from energon_lite.trainer.training.profiling import ProfileWindow
from energon_lite.trainer.training.starting_weights import load_starting_weights
from energon_lite.trainer.training.step import evaluate, train_step
from energon_lite.trainer.training.throughput import flops_per_token, memory_in_use, peak_flops

#: Settings that change no step, by section.
HARMLESS = {
    "": "output mesh",
    "data.": "workers path val_path share prefetch_factor",
    "model.": "recompute compile fuse_projections loss_chunk",
    "train.": "save_every keep async_save save_timeout log_every eval_every tensorboard peak_tflops init_from "
    "init_from_ignore profile nonfinite_limit",
}

logger = logging.getLogger(__name__)


class Trainer:
    """A run: a configuration made into a model, an optimizer and loaders, and the loop over them.

    Everything a run leaves is under ``config.output``: ``metrics.jsonl`` (a line per step) and ``checkpoints/``. If
    there is a checkpoint already, :meth:`run` goes on from it, in whatever layout it was saved.

    Args:
        config: the run.

    Raises:
        TopologyError: the layout does not fit the ranks, the model or the micro-batches of a step.

    Example:
        >>> with Trainer(load_config("run.yaml")) as trainer:
        ...     trainer.run()
        100
    """

    def __init__(self, config: TrainerConfig):
        self.config, data, train = config, config.data, config.train
        if train.deterministic:
            make_deterministic()
        self.mesh = build_mesh(**vars(config.mesh))
        self.model = LlamaModel(config.model, self.mesh, seed=config.seed)
        freeze(self.model, train.freeze, self.mesh)
        self.optimizer = make_optimizer(self.model, self.mesh, config.optimizer)
        self.data = RunData(data, config.model, self.mesh, seed=config.seed, evaluates=train.eval_every > 0)
        self.loader, self.val_loader = self.data.train_loader, self.data.val_loader
        self.checkpoints = f"{config.output}/checkpoints"
        self.saver = CheckpointSaver(self.checkpoints, self.mesh, keep=train.keep, timeout=train.save_timeout)
        self.guard = NonFiniteGuard(self.model, self.optimizer, self.mesh, train.nonfinite_limit, data.skip_steps)
        self.profile = ProfileWindow(train.profile, f"{config.output}/profile", self.mesh)
        self.peak_flops = train.peak_tflops * 1e12 if train.peak_tflops else peak_flops(self.mesh.device)

    def run(self) -> int:
        """Train until the last step, or until a rank gets SIGTERM; either way with a checkpoint at the end.

        Returns:
            The number of steps that are done.

        Raises:
            NonFiniteError: on all ranks: weights are NaN or infinite, or too many steps in a row were.
        """
        start, total = self.resume(), self.config.train.steps
        with ExitStack() as stack:
            terminated = stack.enter_context(_until_sigterm())
            stack.push(self._finish_saving)
            visible = self.mesh.is_main
            progress = Progress(total, done=start, every=self.config.train.log_every, visible=visible)
            metrics = self._metrics(start)
            for closed in (progress, *metrics):
                stack.callback(closed.close)
            batches, done, overdue = iter(self.loader), start, False
            for step in range(start + 1, total + 1):
                values = self.step(step, batches)
                for sink in metrics:
                    sink.write(values)
                progress.show(step, values)
                # Signals arrive at different times; all ranks must take the same branch.
                stopping, bad = self.mesh.any_rank_each(terminated.is_set(), not is_finite(values))
                self.guard.saw(step, values, self.data.last_step() if bad else None)
                overdue = overdue or _due(step, self.config.train.save_every)
                if stopping or step == total or (overdue and not bad):
                    self.save(step)
                    overdue = False
                done = step
                if stopping:
                    logger.log(logging.INFO if visible else logging.DEBUG, "stopped after step %d by SIGTERM", step)
                    break
            self.saver.finish()
        return done

    def step(self, step: int, batches: Iterator[Any]) -> dict[str, Any]:
        """One optimizer step, and the evaluation if it is due.

        Args:
            step: its number, counted from 1.
            batches: this rank's micro-batches.

        Returns:
            The step's line of metrics.
        """
        began = time.perf_counter()
        micro_batches = self.data.take_step(batches)
        fetched = time.perf_counter()
        lr = partial(scaled_learning_rate, step - 1, self.config.train.steps, self.config.optimizer)
        with self.profile.step(step) as record:
            result = train_step(self.model, self.optimizer, micro_batches, self.mesh, lr=lr, record=record)
        seconds = time.perf_counter() - began
        values: dict[str, Any] = {
            "step": step,
            **vars(result),
            "seconds": seconds,
            "data_wait": fetched - began,
            "tokens_per_second": result.tokens / seconds,
            "memory_gib": memory_in_use(self.mesh.device),
            **self.config.optimizer.learning_rates(result.lr),
        }
        if (skipped := step - self.optimizer.updates) > 0:
            values["skipped_updates"] = skipped
        if self.peak_flops is not None:
            needed = flops_per_token(self.config.model, self.config.data.max_length) * result.tokens
            values["mfu"] = needed / seconds / (self.peak_flops * self.mesh.world_size)
        if self.val_loader is not None and _due(step, self.config.train.eval_every):
            values["eval_loss"], values["eval_tokens"] = evaluate(self.model, self.val_loader, self.mesh)
        return values

    def save(self, step: int) -> Place:
        """Begin to write a checkpoint after ``step`` steps; :meth:`close` waits for it. Every rank must call it.

        While steps are not finite, no former one is removed for it.

        Raises:
            NonFiniteError: weights or moments are not finite; nothing is written.
        """
        self.guard.check_state(step)
        config, guard = config_to_dict(self.config), self.guard.state()
        state = {"loader": self.loader.save_state_rank(), "config": config, "nonfinite": guard}
        place = self.saver.save(step, self.model, self.optimizer, state, prune=not self.guard.in_a_row)
        if not self.config.train.async_save:
            self.saver.finish()
        return place

    def resume(self) -> int:
        """Go on from the newest checkpoint, if there is one. Every rank must call it.

        Returns:
            The number of steps that are done.
        """
        path = find_checkpoint(self.checkpoints, self.mesh)
        if path is None:
            train = self.config.train
            if train.init_from is not None:
                ignore = train.init_from_ignore
                read = load_starting_weights(train.init_from, self.model, self.mesh, self.optimizer, ignore=ignore)
                self.guard.check_state(0, read=read)
            return 0
        step, state = load_checkpoint(path, self.model, self.mesh, self.optimizer)
        self.guard.check_state(step, read=path)
        self.loader.restore_state_rank(state["loader"])
        self.guard.restore(state.get("nonfinite", {}))
        if self.mesh.is_main:
            logger.info("resumed from %s", path)
            for change in _changes(state["config"], config_to_dict(self.config)):
                logger.warning("resumed with another setting: %s", change)
        return step

    def close(self) -> None:
        """Finish a checkpoint that is being written, within ``train.save_timeout``; end the loaders' workers; on ranks
        that torchrun started, also leave the process group.

        Raises:
            StateError: the checkpoint could not be written, or not in time.
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with ExitStack() as stack:  # whatever fails, and if it is a second Ctrl-C, the rest is closed too
            stack.callback(self.mesh.close)
            stack.callback(self.profile.close)
            stack.callback(self.data.close)
            terminated = stack.enter_context(_until_sigterm())
            self._finish_saving(kind, error, trace)
        if terminated.is_set() and error is None:
            os.kill(os.getpid(), signal.SIGTERM)  # it was put off, not meant for us alone

    def _finish_saving(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the checkpoint that is being written. If it fails, that does not hide an error that was before."""
        try:
            self.saver.close()
        except StateError as lost:
            if error is None:
                raise
            logger.error("%s", lost)

    def _metrics(self, after: int) -> list[MetricsFile | TensorBoardFolder]:
        """Where this rank writes each step's metrics."""
        if not self.mesh.is_main:
            return []
        sinks: list[MetricsFile | TensorBoardFolder] = [MetricsFile(f"{self.config.output}/metrics.jsonl", after=after)]
        if self.config.train.tensorboard:
            sinks.append(TensorBoardFolder(f"{self.config.output}/tensorboard", after=after))
        return sinks


def make_deterministic() -> None:
    """Only kernels that give the same bits each time, and one thread per process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(1)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def _until_sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, instead of ending the process on the spot."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event  # only the main thread may have signal handlers
        return
    before = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGTERM, before)


def _changes(old: dict[str, Any], new: dict[str, Any], at: str = "") -> Iterator[str]:
    """What differs between two configurations, but for settings that change no step."""
    harmless = HARMLESS.get(at, "").split()
    for key in sorted(old.keys() | new.keys()):
        path, before, now = f"{at}{key}", old.get(key), new.get(key)
        if key in harmless or before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            yield from _changes(before, now, f"{path}.")
        else:
            yield f"{path} was {before!r}, is {now!r}"
