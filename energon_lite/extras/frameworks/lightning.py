"""Lightning: a data module of savable loaders that resumes within an epoch, on any number of devices."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from energon_lite.errors import UsageError
from energon_lite.extras.frameworks.trainer_loader import TrainerLoader
from energon_lite.imports import optional_imports
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.savable_loader import SavableDataLoader
from energon_lite.worker_config import WorkerConfig

with optional_imports("lightning", "this needs lightning"):
    from lightning.pytorch import LightningDataModule

__all__ = ["EnergonDataModule"]

Kind = TypeVar("Kind", bound=TrainerLoader)
Make = Callable[[WorkerConfig], SavableDataset | SavableDataLoader]


class EnergonDataModule(LightningDataModule):
    """Training and validation data for ``Trainer.fit``, with the loader state in every checkpoint.

    The loaders deal batches to devices; Lightning does not change that. Training resumes from any checkpoint after the
    last batch that was trained on, on any number of devices; if it was saved within an epoch, the rest of the epoch is
    counted for the new number. A validation always starts at the first batch.

    Args:
        train: function from the ``WorkerConfig`` of a device to the training data: ``get_train_dataset(...)``,
            or a loader of it.
        val: the same for validation data, or a dict of several functions.
        num_workers: worker processes of each device.
        seed_offset: seed of the run.

    Example:
        >>> data = EnergonDataModule(
        ...     lambda config: get_train_dataset("data", worker_config=config, batch_size=8),
        ...     lambda config: get_val_dataset("data", worker_config=config, batch_size=8),
        ... )
        >>> Trainer(max_steps=1000).fit(module, data, ckpt_path="last")
    """

    def __init__(
        self, train: Make, val: Make | Mapping[str, Make] | None = None, *, num_workers: int = 4, seed_offset: int = 0
    ):
        super().__init__()
        if val is None:  # Lightning warns if it is overridden and the model has no validation
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]
        self._make_train = train
        self._make_val = val or {}
        self._workers = num_workers
        self._seed = seed_offset
        self._train: _TrainLoader | None = None
        self._loaders = weakref.WeakSet[TrainerLoader]()  # Lightning may have loaders made again and again
        self._saved: dict[str, Any] | None = None

    def train_dataloader(self) -> TrainerLoader:
        """Return the training loader, at the position of the checkpoint."""
        if self._train is None:
            self._train = self._loader(self._make_train, _TrainLoader)
            self._train.taken_ahead = self._in_work
        self._train.fit_loop = self._trainer.fit_loop
        if self._saved is not None:
            self._train.load_state_dict(self._saved["train"])
            self._saved = None
        return self._train

    def val_dataloader(self) -> Any:
        """Return the validation loaders."""
        made = self._make_val
        if isinstance(made, Mapping):
            return {name: self._loader(make, TrainerLoader) for name, make in made.items()}
        return self._loader(made, TrainerLoader)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was trained on, for any number of devices; all call it."""
        if self._train is None:
            return self._saved or {}
        return {"train": self._train.state_dict(), "devices": self._trainer.world_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state. Lightning restores its own counts afterwards; it may have the loader already."""
        self._count_for(state_dict["devices"])
        self._saved = state_dict
        if self._train is not None:
            self.train_dataloader()

    def teardown(self, stage: str) -> None:
        """Stop the workers. A restarted loop continues at its position."""
        for loader in self._loaders:
            loader.loader.close()

    @property
    def _trainer(self) -> Any:
        if self.trainer is None:
            raise UsageError("the data module has no trainer", fix="give it to Trainer.fit")
        return self.trainer

    def _loader(self, make: Make, kind: type[Kind]) -> Kind:
        rank, world_size = self._trainer.global_rank, self._trainer.world_size
        config = WorkerConfig(rank=rank, world_size=world_size, num_workers=self._workers, seed_offset=self._seed)
        loader = kind(make(config), rank=rank, world_size=world_size)
        loader.loader.to(self._trainer.strategy.root_device)
        self._loaders.add(loader)
        return loader

    def _in_work(self) -> int:
        """Return the number of batches that Lightning is processing."""
        counted = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return int(counted.ready - counted.processed)

    def _count_for(self, devices: int) -> None:
        """Convert the checkpoint's counts of batches of the resumed epoch to the current number of devices."""
        if self.trainer is None or devices == self.trainer.world_size:
            return
        accumulated = self.trainer.accumulate_grad_batches
        loops = self.trainer._checkpoint_connector._loaded_checkpoint["loops"]
        counted = loops["fit_loop"]["epoch_loop.batch_progress"]["current"]
        processed = counted["processed"]
        done = processed * devices // self.trainer.world_size // accumulated * accumulated
        counted |= {name: done + count - processed for name, count in counted.items()}


class _TrainLoader(TrainerLoader):
    """Training loader that tells Lightning which batch is the last, so that Lightning takes none ahead to find out."""

    fit_loop: Any

    def __iter__(self) -> Iterator[Any]:
        if (fetcher := self.fit_loop._data_fetcher) is not None:
            fetcher.prefetch_batches = 0
        return self._told(fetcher)

    def _told(self, fetcher: Any) -> Iterator[Any]:
        for batch in super().__iter__():
            if fetcher is not None:
                fetcher.done = self.at_end
            yield batch
