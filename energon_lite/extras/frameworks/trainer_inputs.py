"""Data loader methods of Hugging Face's Trainer, implemented with savable loaders."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.extras.frameworks.accelerate import AccelerateLoader
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.savable_loader import SavableDataLoader

__all__ = ["TrainerInputs"]


class TrainerInputs:
    """Mixin with the methods of ``Trainer`` that make loaders; put it before ``Trainer`` among the base classes.

    They return a loader for each savable loader or data set, and ``Trainer``'s own for other data.
    """

    _loaders: dict[int, AccelerateLoader] | None = None
    _taken: set[str] | None = None  # entries of a batch that the model's `forward` accepts

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
        own: AccelerateLoader | None = self._own_loader(self.train_dataset, self.args.train_batch_size)
        return own

    def _own_loader(self: Any, data: Any, batch_size: int) -> AccelerateLoader | None:
        """Return the loader of savable data; None for other data."""
        if not isinstance(data, (SavableDataset, SavableDataLoader)):
            return None
        self._loaders = {} if self._loaders is None else self._loaders
        if id(data) not in self._loaders:
            self._loaders[id(data)] = loader = AccelerateLoader(data, convert=self._inputs)
            rows = loader.batches.rows
            if rows not in (None, batch_size):
                raise UsageError(
                    f"batches have {rows} samples, and the trainer believes that they have {batch_size}",
                    fix="give the data set batch_size=args.per_device_train_batch_size, or ..._eval_batch_size",
                )
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
