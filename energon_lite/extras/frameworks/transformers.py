"""Hugging Face's Trainer: a mixin for savable loaders, with the loader state in checkpoints.

Trainer alone reads its data again up to the resumed position, on the same number of processes. With the mixin it
resumes at once, on any number.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from energon_lite.errors import StateError, UsageError
from energon_lite.extras.frameworks.accelerate import AccelerateLoader
from energon_lite.imports import optional_imports
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.savable_loader import SavableDataLoader
from energon_lite.loading.saved_states import write_state_file

__all__ = ["EnergonTrainerMixin", "use_loaders"]

logger = logging.getLogger(__name__)


#: File with the state of the training loader, for any number of processes.
STATE_FILE = "energon_lite_loader.json"
#: File that Trainer writes last.
TRAINER_FILE = "trainer_state.json"
#: Trainer's mark of a checkpoint that it writes in a hurry before the machine is shut down.
_MARK = "checkpoint-is-incomplete.txt"


def newest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the complete ``checkpoint-N`` with the largest N, or None if there is none.

    Each skipped checkpoint is reported as a warning.
    """
    paths = [path for path in Path(folder).glob("checkpoint-*") if path.name[11:].isdecimal()]
    checkpoints = {int(path.name[11:]): path for path in paths}
    for _, path in sorted(checkpoints.items(), reverse=True):
        why = ""
        try:
            read_json(path / TRAINER_FILE)
        except StateError as error:
            why = error.what
        cut = [file.name for file in path.glob("*.pt*") if not zipfile.is_zipfile(file)]
        why = why or (f"{cut[0]} is cut short" if cut else f"{_MARK} is in it" if (path / _MARK).exists() else "")
        if not why:
            return str(path)
        logger.warning("%s is passed over: %s", path, why)
    return None


def read_json(path: Path) -> Any:
    """Read a JSON file of a checkpoint.

    Raises:
        StateError: the file is missing or damaged.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StateError(
            f"the checkpoint cannot be resumed: {error}",
            where=str(path),
            fix="give another one; or ignore_data_skip=True among the arguments, to start the data from the beginning",
        ) from error


with optional_imports("hf", "this needs transformers"):
    from transformers import trainer as trainer_module

#: Methods that the mixin overrides: a Trainer without one of them would silently skip batches a second time.
_NEEDED = ("set_initial_training_values", "_init_training_state", "_run_epoch", "get_batch_samples", "_save_checkpoint")
if not all(hasattr(trainer_module.Trainer, name) for name in _NEEDED):
    raise UsageError("this version of transformers has another Trainer", fix="pip install 'transformers>=5.3'")


class EnergonTrainerMixin:
    """Mixin for ``Trainer``, or a class derived from it: put it first among the base classes.

    ``train_dataset`` and ``eval_dataset`` (also a dict of them) may be savable loaders, or data sets to make loaders
    of.

    * Batches are passed to the model unchanged: they are not sharded, collated or dispatched. Entries that ``forward``
        does not take are left out, unless ``remove_unused_columns=False``.
    * Each ``checkpoint-N`` has the loader state after step N. ``resume_from_checkpoint`` resumes from it, on any
      number of processes, for which epochs are recounted. ``True`` uses the newest complete checkpoint. Without it, the
      loader continues at its position.
    Example:
        >>> class MyTrainer(EnergonTrainerMixin, Trainer): ...
        >>> config = WorkerConfig.default_worker_config(num_workers=4)  # after TrainingArguments was made
        >>> data = get_train_dataset("data", worker_config=config, batch_size=args.per_device_train_batch_size)
        >>> MyTrainer(model, args, train_dataset=data).train(resume_from_checkpoint=True)
    """

    _loaders: dict[int, AccelerateLoader] | None = None
    _taken: set[str] | None = None  # entries of a batch that the model's `forward` accepts
    _resumed: Path | None = None  # the checkpoint
    _place: tuple[int, int]  # finished epochs, and finished batches of the next one
    _before: tuple[int, dict[str, Any]] | None = None  # a step, and the loader state before its batches

    def get_train_dataloader(self: Any) -> Any:
        own = self._train_loader()
        return super().get_train_dataloader() if own is None else own  # type: ignore[misc]

    def get_eval_dataloader(self: Any, eval_dataset: Any = None) -> Any:
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        data = self.eval_dataset[data] if isinstance(data, str) else data
        own = self._own_loader(data, self.args.eval_batch_size)
        return super().get_eval_dataloader(eval_dataset) if own is None else own  # type: ignore[misc]

    def get_test_dataloader(self: Any, test_dataset: Any) -> Any:
        own = self._own_loader(test_dataset, self.args.eval_batch_size)
        return super().get_test_dataloader(test_dataset) if own is None else own  # type: ignore[misc]

    def _train_loader(self: Any) -> AccelerateLoader | None:
        return self._own_loader(self.train_dataset, self.args.train_batch_size)

    def _own_loader(self: Any, data: Any, batch_size: int) -> AccelerateLoader | None:
        """Return the loader of savable data; None for other data."""
        if not isinstance(data, (SavableDataset, SavableDataLoader)):
            return None
        self._loaders = {} if self._loaders is None else self._loaders
        if id(data) not in self._loaders:
            loader = AccelerateLoader(data, convert=self._inputs)
            rows = loader.batches.rows
            if rows not in (None, batch_size):
                raise UsageError(
                    f"batches have {rows} samples, but the trainer assumes {batch_size}",
                    fix="give the data set batch_size=args.per_device_train_batch_size, or ..._eval_batch_size",
                )
            self._loaders[id(data)] = loader
        return self._loaders[id(data)]

    def _inputs(self: Any, batch: Any) -> Any:
        """Return the arguments of the model: the entries of a batch that it accepts."""
        if dataclasses.is_dataclass(batch):
            batch = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        if not self.args.remove_unused_columns or not isinstance(batch, Mapping):
            return batch
        if self._taken is None:
            # Trainer's own list has columns before collation, of which some classes list only a part.
            self._set_signature_columns_if_needed()
            model = self.accelerator.unwrap_model(self.model)
            model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of an adapter like LoRA
            self._taken = {*self._signature_columns, *inspect.signature(model.forward).parameters}
        return {name: value for name, value in batch.items() if name in self._taken}

    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_checkpoint(self.args.output_dir) or True
        self._resumed = self._before = None
        is_path = isinstance(resume_from_checkpoint, (str, os.PathLike))
        if is_path and self._train_loader() is not None and not self.args.ignore_data_skip:
            self._resumed = Path(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def set_initial_training_values(self: Any, args: Any, dataloader: Any) -> Any:
        values = super().set_initial_training_values(args, dataloader)  # type: ignore[misc]
        if self._resumed is None:
            return values
        state, saved = (read_json(self._resumed / name) for name in (STATE_FILE, TRAINER_FILE))
        self._train_loader().load_state_dict(state)
        epochs, updates, *numbers, batches, max_steps = values
        # Trainer would count from the step number, assuming a constant number of processes.
        whole, accumulated = int(saved["epoch"]), args.gradient_accumulation_steps
        begun = round((saved["epoch"] - whole) * batches)
        loader = self._train_loader().batches.loader
        if not loader.dataset.is_endless:
            begun = min(begun, state["position"] // loader.worker_config.world_size)  # the pass must end
        begun = min(begun // accumulated, updates - 1)
        self._place = whole, begun * accumulated
        done = whole * updates + begun
        to_go = max_steps - (saved["global_step"] if args.max_steps > 0 else done)
        return max(epochs, -(-(done + to_go) // updates)), updates, *numbers, batches, saved["global_step"] + to_go

    def _init_training_state(self: Any, *args: Any) -> Any:
        progress = super()._init_training_state(*args)  # type: ignore[misc]
        return progress if self._resumed is None else self._place

    def _run_epoch(self: Any, *args: Any, **kwargs: Any) -> Any:
        skip = trainer_module.skip_first_batches
        if self._resumed is not None:
            trainer_module.skip_first_batches = lambda dataloader, batches: dataloader  # it is at the position already
        try:
            return super()._run_epoch(*args, **kwargs)  # type: ignore[misc]
        finally:
            trainer_module.skip_first_batches = skip

    def get_batch_samples(self: Any, *args: Any) -> Any:
        own = self._train_loader()
        self._before = None if own is None else (self.state.global_step, own.batches.own_state())
        return super().get_batch_samples(*args)  # type: ignore[misc]

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> Any:
        own, step = self._train_loader(), self.state.global_step
        if own is not None:
            # A checkpoint between steps, as before a shutdown, excludes batches that were taken for the next step.
            before = self._before[1] if self._before is not None and self._before[0] == step else None
            state = own.batches.state_dict(before)
            if self.args.should_save:
                folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{step}")
                folder.mkdir(parents=True, exist_ok=True)
                write_state_file(folder / STATE_FILE, state)  # before Trainer marks the checkpoint as complete
        return super()._save_checkpoint(model, trial)  # type: ignore[misc]


def use_loaders(trainer: Any, *, train: Any = None, evaluation: Any = None) -> Any:
    """Set savable loaders in a trainer that was made with other data, for example because its class prepares data.

    Args:
        trainer: trainer of any class derived from ``Trainer``; it is changed.
        train: a loader or a data set; None to keep the current one.
        evaluation: the same, or a dict of them.

    Returns:
        The trainer.
    """
    kind = type(trainer)
    if not isinstance(trainer, EnergonTrainerMixin):
        trainer.__class__ = type(kind.__name__, (EnergonTrainerMixin, kind), {})
    trainer.train_dataset = trainer.train_dataset if train is None else train
    trainer.eval_dataset = trainer.eval_dataset if evaluation is None else evaluation
    return trainer
