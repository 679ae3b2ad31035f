"""Lightning: a data module of savable loaders that resumes within an epoch, on any number of devices."""

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
        self._train: TrainerLoader | None = None
        self._loaders: list[TrainerLoader] = []
        self._saved: dict[str, Any] | None = None

    def train_dataloader(self) -> TrainerLoader:
        """Return the training loader, at the position of the checkpoint."""
        if self._train is None:
            self._train = self._loader(self._make_train)
            self._train.taken_ahead = self._taken_ahead
        if self._saved is not None:
            self._train.load_state_dict(self._saved["train"])
            self._count_for(self._saved["devices"])
            self._saved = None
        return self._train

    def val_dataloader(self) -> Any:
        """Return the validation loaders."""
        made = self._make_val
        if isinstance(made, Mapping):
            return {name: self._loader(make) for name, make in made.items()}
        return self._loader(made)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was trained on, for any number of devices; all call it."""
        if self._train is None:
            return self._saved or {}
        return {"train": self._train.state_dict(), "devices": self._trainer.world_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state to resume from when the training begins."""
        self._saved = state_dict

    def teardown(self, stage: str) -> None:
        """Stop the workers. A restarted loop continues at its position."""
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
        """Return the number of batches that Lightning has fetched ahead or is processing."""
        loop = self._trainer.fit_loop
        counted = loop.epoch_loop.batch_progress.current
        return int(counted.ready - counted.processed) + len(getattr(loop._data_fetcher, "batches", ()))

    def _count_for(self, devices: int) -> None:
        """Convert the counts of batches of the resumed epoch to the current number of devices."""
        now, accumulated = self._trainer.world_size, self._trainer.accumulate_grad_batches
        if devices == now:
            return
        counted = self._trainer.fit_loop.epoch_loop.batch_progress.current
        done = counted.processed * devices // now // accumulated * accumulated
        counted.ready, counted.started, counted.processed, counted.completed = (
            done + count - counted.processed
            for count in (counted.ready, counted.started, counted.processed, counted.completed)
        )
