"""Lightning: a data module of savable loaders, which goes on in the middle of an epoch, on any number of devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.extras.frameworks.trainer_loader import TrainerLoader
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.savable_loader import SavableDataLoader
from energon_lite.worker_config import WorkerConfig

try:
    from lightning.pytorch import LightningDataModule
except ImportError as error:
    raise UsageError(f"this needs lightning: {error}", fix="pip install 'energon-lite[lightning]'") from error

__all__ = ["EnergonDataModule"]

Make = Callable[[WorkerConfig], SavableDataset | SavableDataLoader]


class EnergonDataModule(LightningDataModule):
    """Training and validation data for ``Trainer.fit``, whose place in the data is part of every checkpoint.

    Batches are dealt to devices by the loaders; Lightning leaves them alone. A checkpoint of any moment is resumed with
    the batch behind the last one that was trained on, on any number of devices; if it was saved in the middle of an
    epoch, what is left of the epoch is counted for the new number. A validation always begins with the first batch.

    Args:
        train: makes the training data, from the ``WorkerConfig`` of its device: ``get_train_dataset`` with what it
            needs, or a loader of that.
        val: the same for validation, or a dict of several.
        num_workers: worker processes of each device.
        seed_offset: the seed of the run.

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
        if val is None:  # Lightning looks whether it is overridden, and would warn of models that cannot validate
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]
        self._make_train, self._make_val = train, val or {}
        self._workers, self._seed = num_workers, seed_offset
        self._train: TrainerLoader | None = None
        self._loaders: list[TrainerLoader] = []
        self._saved: dict[str, Any] | None = None

    def train_dataloader(self) -> TrainerLoader:
        """The training data, where the checkpoint says."""
        if self._train is None:
            self._train = self._loader(self._make_train)
            self._train.taken_ahead = self._taken_ahead
        if self._saved is not None:
            self._train.load_state_dict(self._saved["train"])
            self._count_for(self._saved["devices"])
            self._saved = None
        return self._train

    def val_dataloader(self) -> Any:
        """The validation data."""
        made = self._make_val
        if made is None:
            return []
        return (
            {name: self._loader(one) for name, one in made.items()} if isinstance(made, Mapping) else self._loader(made)
        )

    def state_dict(self) -> dict[str, Any]:
        """The place behind the last batch that was trained on, for any number of devices; all of them call it."""
        if self._train is None:
            return self._saved or {}
        return {"train": self._train.state_dict(), "devices": self._trainer.world_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on there when the training begins."""
        self._saved = state_dict

    def teardown(self, stage: str) -> None:
        """Stop the workers. What is begun again goes on where it was."""
        for loader in self._loaders:
            loader.loader.close()

    @property
    def _trainer(self) -> Any:
        if self.trainer is None:
            raise UsageError("the data module has no trainer", fix="give it to Trainer.fit")
        return self.trainer

    def _loader(self, make: Make) -> TrainerLoader:
        rank, world_size = self._trainer.global_rank, self._trainer.world_size
        config = WorkerConfig(rank=rank, world_size=world_size, num_workers=self._workers, seed_offset=self._seed)
        loader = TrainerLoader(make(config), rank=rank, world_size=world_size)
        loader.loader.to(self._trainer.strategy.root_device)
        self._loaders.append(loader)
        return loader

    def _taken_ahead(self) -> int:
        """Batches that wait in Lightning's hands, because nobody knows how many there are, or that are at work."""
        loop = self._trainer.fit_loop
        counted = loop.epoch_loop.batch_progress.current
        return int(counted.ready - counted.processed) + len(getattr(loop._data_fetcher, "batches", ()))

    def _count_for(self, devices: int) -> None:
        """Batches of the epoch that is resumed were counted on another number of devices."""
        now, accumulated = self._trainer.world_size, self._trainer.accumulate_grad_batches
        if devices == now:
            return
        counted = self._trainer.fit_loop.epoch_loop.batch_progress.current
        done = counted.processed * devices // now // accumulated * accumulated
        counted.ready, counted.started, counted.processed, counted.completed = (
            done + count - counted.processed
            for count in (counted.ready, counted.started, counted.processed, counted.completed)
        )
