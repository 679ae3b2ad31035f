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

from energon_lite import WorkerConfig, get_loader, get_savable_loader, get_train_dataset, get_val_dataset
from energon_lite.errors import StateError, TopologyError
from energon_lite.trainer.checkpointing.checkpoint import CheckpointSaver, Place, find_checkpoint, load_checkpoint
from energon_lite.trainer.optimizer.learning_rates import scaled_learning_rate
from energon_lite.trainer.optimizer.plain_optimizer import make_optimizer
from energon_lite.trainer.parallel.mesh import ParallelMesh, build_mesh
from energon_lite.trainer.parallel.parameters import freeze
from energon_lite.trainer.training.config import TrainerConfig
from energon_lite.trainer.training.config_file import config_to_dict
from energon_lite.trainer.training.data import make_task_encoder
from energon_lite.trainer.training.llama import LlamaModel
from energon_lite.trainer.training.metrics import MetricsFile, Progress, TensorBoardFolder
from energon_lite.trainer.training.nonfinite import NonFiniteGuard, StepData, is_finite
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
        self.micro_batches = _share_of_step(data.micro_batches_per_step, self.mesh)
        self.model = LlamaModel(config.model, self.mesh, seed=config.seed)
        freeze(self.model, train.freeze, self.mesh)
        self.optimizer = make_optimizer(self.model, self.mesh, config.optimizer)
        # A step takes all of its micro-batches at once: so many are to be ready while the one before it is computed.
        ahead = data.prefetch_factor or max(2, -(-self.micro_batches // max(1, data.workers)))
        # Loader steps, of which each has a micro-batch for every data-parallel rank.
        skipped = [(step - 1) * self.micro_batches + i for step in data.skip_steps for i in range(self.micro_batches)]
        self.loader = get_savable_loader(self._dataset(training=True), prefetch_factor=ahead, skip_steps=skipped)
        self.val_loader = get_loader(self._dataset(training=False)) if train.eval_every else None
        self.checkpoints = f"{config.output}/checkpoints"
        self.saver = CheckpointSaver(self.checkpoints, self.mesh, keep=train.keep, timeout=train.save_timeout)
        self.guard = NonFiniteGuard(self.model, self.optimizer, self.mesh, train.nonfinite_limit, data.skip_steps)
        self._restore_keys: list[tuple[Any, ...]] = []  # of the last step's micro-batches
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
                self.guard.saw(step, values, self._data_of_step() if bad else None)
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
        # All of the step's micro-batches first: the loss needs the number of tokens before the first backward pass.
        fetched_now = [next(batches) for _ in range(self.micro_batches)]
        self._restore_keys = [batch.__restore_key__ for batch in fetched_now if batch is not None]
        micro_batches = [None if batch is None else batch.to(self.mesh.device) for batch in fetched_now]
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
            for loader in (self.loader, self.val_loader):
                if loader is not None:
                    stack.callback(loader.close)
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

    def _data_of_step(self) -> StepData:
        """Where the data of the last step comes from."""
        share, stop = self.config.data.micro_batches_per_step, self.loader.state_dict()["position"]
        # Two numbers where a step takes parts of two, because micro_batches_per_step was another one before.
        return StepData(list(range((stop - share) // share + 1, (stop - 1) // share + 2)), self._restore_keys)

    def _dataset(self, *, training: bool) -> Any:
        data, mesh = self.config.data, self.mesh
        settings: dict[str, Any] = {"num_workers": data.workers, "seed_offset": self.config.seed}
        if mesh.device_mesh is None:
            workers = WorkerConfig(rank=0, world_size=1, **settings)
        else:
            workers = WorkerConfig.from_mesh(mesh.device_mesh, stages="ends", share=data.share, **settings)  # type: ignore[arg-type]
        common: dict[str, Any] = {"worker_config": workers, "batch_size": data.micro_batch_size}
        if data.batching is not None:
            common |= {"batch_size": None, "batching": data.batching, "length_column": data.length_column}
        common["task_encoder"] = make_task_encoder(data, self.config.model, training=training)
        if not training:
            return get_val_dataset(data.val_path or data.path, **common)
        order = {name: getattr(data, name) for name in ("shuffle_buffer_size", "max_samples_per_sequence")}
        return get_train_dataset(data.path, **order, **common)

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


def _share_of_step(micro_batches: int, mesh: ParallelMesh) -> int:
    """Micro-batches of a step for each data-parallel rank."""
    if micro_batches % mesh.dp:
        sizes = ", ".join(str(dp) for dp in range(1, micro_batches + 1) if micro_batches % dp == 0)
        raise TopologyError(
            f"{micro_batches} micro-batches per step cannot be shared evenly by dp={mesh.dp} ranks",
            fix=f"set data.micro_batches_per_step to a multiple of {mesh.dp}, or use dp of {sizes}",
        )
    return micro_batches // mesh.dp


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
