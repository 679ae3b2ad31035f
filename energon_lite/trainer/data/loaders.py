"""Data of a run: its configuration, task encoder and loaders, and the micro-batches of a step."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from energon_lite import (
    ByTokens,
    ConcatSplit,
    TaskEncoder,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon_lite.batching import strategy_from_dict
from energon_lite.errors import ConfigError, TopologyError, UsageError, require, require_at_least
from energon_lite.imports import find_named
from energon_lite.trainer.data.rows import RowsTaskEncoder
from energon_lite.trainer.data.task_encoder import MultimodalTaskEncoder
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.interface import TrainingBatch
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.tokenizing.tokenizer import make_tokenizer


@dataclass(frozen=True)
class DataConfig:
    """Data section of a configuration: sources, task encoder and micro-batches of a step.

    Args:
        path: a prepared folder or a metadataset YAML, whose ``train`` split is the training data.
        val_path: the same for the ``val`` split; None to evaluate on that of ``path``, or on ``val`` alone.
        val: further validation sets, by their names in the metrics.
        task_encoder: ``module:Class`` of the task encoder, or a function that makes it; None for the trainer's, see
            :class:`MultimodalTaskEncoder`. It runs in the loader's worker processes.
        task_encoder_args: keyword arguments for it.
        micro_batch_size: samples in one forward and backward pass.
        micro_batches_per_step: micro-batches of an optimizer step, over *all* data-parallel ranks together. Each rank
            gets an equal share, so a run on another layout takes the same steps.
        workers: loader processes per rank; 0 loads in the training process.
        share: ``load``: all ranks of a model replica that need a batch load it; ``broadcast``: one rank loads it and
            sends it to the others.
        shuffle_buffer_size: window in samples within which sequences are mixed; None for a full permutation.
        max_samples_per_sequence: neighbours on disk that stay together in the order; None for single samples.
        max_length: tokens of a row; a longer caption is truncated, from a longer text a random window is taken.
        tokenizer: a folder with ``tokenizer.json``, or that file; None for the bytes of UTF-8.
        batching: strategy that groups samples into micro-batches by tokens, as a document such as ``{strategy:
            best_fit, capacity: 4096}``; ``micro_batch_size`` is then ignored. None: equal numbers of samples.
        length_column: the measured column with the tokens of each sample, for ``batching``.
        costs: file of a cost model (from ``energon-lite profile``): the micro-batches of a step are balanced in all
            kinds of work that it includes, see ``ByTokens.costs``. None: no balance beyond ``batching``.
        max_images: the most images of a packed micro-batch; None for no limit.
        prefetch_factor: micro-batches that each worker loads ahead; None for those of a whole step of the rank, and at
            least 2, so that loading overlaps computation with any gradient accumulation.
        repeat: False: the run ends after one epoch of all data, or of a ``blend_epochized``.
        skip_steps: steps, counted from 1, whose micro-batches are passed over; the steps use the next ones instead.
    """

    path: str
    val_path: str | None = None
    val: Mapping[str, str] | None = None
    task_encoder: str | None = None
    task_encoder_args: Mapping[str, Any] | None = None
    micro_batch_size: int = 8
    micro_batches_per_step: int = 4
    workers: int = 1
    shuffle_buffer_size: int | None = None
    max_samples_per_sequence: int | None = None
    max_length: int = 64
    share: str = "load"
    tokenizer: str | None = None
    batching: Mapping[str, Any] | None = None
    length_column: str = "length"
    costs: str | None = None
    max_images: int | None = None
    prefetch_factor: int | None = None
    repeat: bool = True
    skip_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        known = self.share in ("load", "broadcast")
        require(known, f"unknown way to share {self.share!r}", "data.share", "use one of: load, broadcast")
        require("" not in (self.val or {}), "a set has no name", "data.val", "name it, or give its path as val_path")
        require_at_least(self, "data", micro_batch_size=1, micro_batches_per_step=1, max_length=1)
        require_at_least(self, "data", workers=0, prefetch_factor=1)
        planned = self.batching is not None or (self.costs, self.max_images) == (None, None)
        require(
            planned, "costs, or max_images, without batching", "data.batching", "give e.g. {strategy: best_fit, ...}"
        )
        counted = all(step >= 1 for step in self.skip_steps)
        require(counted, "a step is below 1", "data.skip_steps", "steps are counted from 1; give e.g. [7, 8]")


def make_task_encoder(data: DataConfig, model: ModelConfig, *, training: bool = True) -> RowsTaskEncoder:
    """Make the task encoder of a run's data section, for a model.

    ``data.task_encoder`` is called with ``data.task_encoder_args``, and with the arguments of
    :class:`MultimodalTaskEncoder` that its signature names. Batches by tokens are packed if the capacity counts tokens
    without padding (``packed_tokens`` and ``cost``).

    Raises:
        ConfigError: the tokenizer has more tokens than the model, or the arguments do not fit.
        UsageError: there is no such tokenizer, or no such task encoder.
    """
    strategy = None if data.batching is None else strategy_from_dict(data.batching, at="data.batching")
    capacity = getattr(strategy, "capacity", None)
    offered: dict[str, Callable[[], Any]] = {
        "max_length": lambda: data.max_length,
        "image_size": lambda: model.image_size,
        "patch_size": lambda: model.patch_size,
        "pooled": lambda: model.vision is not None and model.vision.pooling != "none",
        "image_token": lambda: None if model.vision is None else model.vision.image_token,
        "training": lambda: training,
        "packed": lambda: (
            isinstance(strategy, ConcatSplit) or getattr(capacity, "unit", "padded_tokens") != "padded_tokens"
        ),
        "tokenizer": lambda: make_tokenizer(data.tokenizer, model.vocab_size),
    }
    return RowsTaskEncoder(_called(data, offered), model)


def _called(data: DataConfig, offered: Mapping[str, Callable[[], Any]]) -> TaskEncoder:
    """Make the encoder from its arguments."""
    made: Any = MultimodalTaskEncoder
    if (text := data.task_encoder) is not None:
        wanted = "a class derived from energon_lite.TaskEncoder"
        example = "data.task_encoder=train:Encoder"
        made = find_named(text, option="data.task_encoder", form="module:Class", example=example, wanted=wanted)
    if callable(made) and not isinstance(made, TaskEncoder):
        names, given = inspect.signature(made).parameters, dict(data.task_encoder_args or {})
        # A class derived from the trainer's that passes on keyword arguments takes all of its arguments.
        passes_on = inspect.isclass(made) and issubclass(made, MultimodalTaskEncoder)
        passes_on &= any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
        taken = {name for name in offered if (passes_on or name in names) and name not in given}
        given = {name: value() for name, value in offered.items() if name in taken} | given
        try:
            inspect.signature(made).bind(**given)
        except TypeError as error:
            what = f"{text or 'MultimodalTaskEncoder'} cannot be made of {', '.join(given) or 'nothing'}: {error}"
            raise ConfigError(what, at="data.task_encoder_args", fix="give its own arguments, by their names") from None
        made = made(**given)
    if not isinstance(made, TaskEncoder):
        what = f"it gives a {type(made).__name__}, not a task encoder"
        raise UsageError(what, where=f"data.task_encoder {text}", fix="derive it from energon_lite.TaskEncoder")
    return made


class StepData(NamedTuple):
    """Origin of the data of a step.

    Args:
        numbers: the step's numbers for ``data.skip_steps``: its own number, if no other was passed over before.
        restore_keys: restore keys of this rank's micro-batches; ``loader.restore_sample`` makes each again.
        digest: digest of the samples in them, modulo 2**64; see ``loader.digest``.
        micro_batches: number of micro-batches, over all data-parallel ranks.
        position: number of micro-batches in the loader's pass up to the end of the step, over all data-parallel ranks.
    """

    numbers: list[int]
    restore_keys: list[tuple[Any, ...]]
    digest: int = 0
    micro_batches: int = 0
    position: int = 0


@dataclass(eq=False)
class RunData:
    """Training loader and validation loaders of a run.

    Args:
        data, model: the sections of the run's configuration.
        mesh: the ranks.
        seed: seed of the order of samples.
        eval_batches: micro-batches of each validation set, over all data-parallel ranks together; 0: all of them; None:
            no evaluation.
        task_encoder: task encoder of all sets; None for that of ``data``.

    Attributes:
        train_loader: loader of this rank's micro-batches.
        val_loaders: validation loaders by the names of the sets; "" is that of ``val_path``.
        last_step: origin of the data of the last step that was taken.

    Raises:
        TopologyError: the micro-batches of a step cannot be shared evenly by the ranks.
    """

    data: DataConfig
    model: ModelConfig
    mesh: ParallelMesh
    task_encoder: TaskEncoder | None = None
    seed: int = field(kw_only=True)
    eval_batches: int | None = field(kw_only=True)

    def __post_init__(self) -> None:
        data, mesh = self.data, self.mesh
        self.micro_batches, over = divmod(data.micro_batches_per_step, mesh.dp)
        if over:
            number = data.micro_batches_per_step
            sizes = ", ".join(str(dp) for dp in range(1, number + 1) if number % dp == 0)
            raise TopologyError(
                f"{number} micro-batches per step cannot be shared evenly by dp={mesh.dp} ranks",
                fix=f"set data.micro_batches_per_step to a multiple of {mesh.dp}, or use dp of {sizes}",
            )
        # A step takes all of its micro-batches at once, so they must be ready while the previous step is computed.
        ahead = data.prefetch_factor or max(2, -(-self.micro_batches // max(1, data.workers)))
        # Loader steps; each has one micro-batch for every data-parallel rank.
        skipped = [(step - 1) * self.micro_batches + i for step in data.skip_steps for i in range(self.micro_batches)]
        self.train_loader = get_savable_loader(self._dataset(None), prefetch_factor=ahead, skip_steps=skipped)
        sets = dict(data.val or {"": data.path}) | ({} if data.val_path is None else {"": data.val_path})
        sets = {} if self.eval_batches is None else sets
        self.val_loaders = {name: get_loader(self._dataset(path)) for name, path in sets.items()}
        for loader in (self.train_loader, *self.val_loaders.values()):
            loader.to(mesh.device)  # batches are copied ahead, during the previous step
        self.last_step = StepData([], [])

    def take_step(self, batches: Iterator[Any]) -> list[TrainingBatch | None]:
        """Return this rank's micro-batches of the next step, on its device; None for each on a stage without data.

        All of them are returned at once, because the loss needs the number of tokens before the first backward pass. At
        the end of the data there are fewer, in equal numbers on all ranks; and none after that.
        """
        fetched, digest = list[Any](), 0
        for batch in itertools.islice(batches, self.micro_batches):
            fetched.append(batch)
            digest += self.train_loader.digest
        # A loader that was restored to the end of its data starts from the beginning.
        if not self.data.repeat and self.train_loader.state_dict()["pass_number"]:
            fetched = []
        keys = [batch.__restore_key__ for batch in fetched if batch is not None]
        taken, share = len(fetched) * self.mesh.dp, self.data.micro_batches_per_step
        stop = self.train_loader.state_dict()["position"]
        # Two numbers if a step takes parts of two, because micro_batches_per_step has changed.
        numbers = list(range((stop - taken) // share + 1, (stop - 1) // share + 2))
        self.last_step = StepData(numbers, keys, digest, taken, stop)
        return fetched

    def validation(self) -> Iterator[tuple[str, Iterator[TrainingBatch | None]]]:
        """Yield each validation set: its name, and this rank's micro-batches of it."""
        dp, rank, most = self.mesh.dp, self.mesh.rank("dp"), self.eval_batches
        for name, loader in self.val_loaders.items():
            # In each loader step, each replica has one micro-batch.
            yield name, (batch for number, batch in enumerate(loader) if not most or number * dp + rank < most)

    def close(self) -> None:
        """End the loaders' workers."""
        with ExitStack() as stack:
            for loader in (self.train_loader, *self.val_loaders.values()):
                stack.callback(loader.close)

    def _dataset(self, validation: str | None) -> Any:
        """Make the training data set, or the validation set of a path, to be read once."""
        data, mesh = self.data, self.mesh
        settings: dict[str, Any] = {"num_workers": data.workers, "seed_offset": self.seed}
        workers = WorkerConfig.from_mesh(mesh, stages="ends", share=data.share, **settings)  # type: ignore[arg-type]
        common: dict[str, Any] = {"worker_config": workers, "batch_size": data.micro_batch_size}
        if data.batching is not None:
            by_tokens = ByTokens(data.batching, length_column=data.length_column, max_images=data.max_images)
            if data.costs is not None and validation is None:
                steps = {"micro_batches_per_step": data.micro_batches_per_step, "costs": data.costs}
                by_tokens = replace(by_tokens, **steps)  # type: ignore[arg-type]
            common |= {"batch_size": None, "batching": by_tokens}
        made = self.task_encoder or make_task_encoder(data, self.model, training=validation is None)
        common["task_encoder"] = made
        if validation is not None:
            limit = -(-(self.eval_batches or 0) // mesh.dp) or None
            return get_val_dataset(validation, limit=limit, **common)
        order = {name: getattr(data, name) for name in ("shuffle_buffer_size", "max_samples_per_sequence")}
        return get_train_dataset(data.path, repeat=data.repeat, **order, **common)
