"""Hugging Face Accelerate: a loader for ``accelerator.prepare``, ``save_state`` and ``load_state``.

Accelerate would split batches again, or read them on the first process only; a loader that deals batches to ranks
passes through ``prepare`` as one that is already prepared. Its state is saved in ``save_state``'s folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.data

from energon_lite.extras.frameworks.trainer_loader import TrainerLoader
from energon_lite.imports import optional_imports
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.state import State
from energon_lite.loading.savable_loader import SavableDataLoader

with optional_imports("accelerate", "this needs accelerate"):
    from accelerate.state import GradientState, PartialState

__all__ = ["AccelerateLoader"]


class _Batches(torch.utils.data.IterableDataset[Any]):
    """The loader as a data set, for ``skip_first_batches`` and other code of torch; its length is in samples."""

    def __init__(self, batches: TrainerLoader):
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return self.batches.samples


class AccelerateLoader(torch.utils.data.DataLoader[Any]):
    """A savable loader for Accelerate: make it after the ``Accelerator``, and give it to ``accelerator.prepare``.

    Batches are on the accelerator's device; the next one is copied during the step on the current one. ``save_state``
    and ``load_state`` save the position in the data, for any number of processes; do not skip batches afterwards.
    ``accelerator.accumulate`` recognizes the last batch of a finite loop, and ``gather_for_metrics`` drops the copies
    that fill the last step of a validation.

    Args:
        loader: the loader, or a data set to make one of; for this process's rank.
        convert: function applied to each batch before it is delivered.

    Raises:
        UsageError, TopologyError: see :class:`~energon_lite.extras.frameworks.trainer_loader.TrainerLoader`.

    Example:
        >>> accelerator = Accelerator(gradient_accumulation_steps=4)
        >>> config = WorkerConfig.default_worker_config(num_workers=4)
        >>> loader = AccelerateLoader(get_train_dataset("data", worker_config=config, batch_size=8))
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    #: Tells ``prepare`` that nothing is left to do, and ``save_state`` that there is a state.
    _is_accelerate_prepared = True
    end_of_dataloader = False
    remainder = -1

    def __init__(self, loader: SavableDataLoader | SavableDataset, *, convert: Callable[[Any], Any] | None = None):
        state = PartialState()
        self.batches = TrainerLoader(loader, rank=state.process_index, world_size=state.num_processes, convert=convert)
        self.batches.loader.to(state.device)
        self.device = state.device
        self.use_stateful_dataloader = not self.batches.starts_over
        super().__init__(_Batches(self.batches), batch_size=None, collate_fn=_same)  # it yields whole batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        gradients = GradientState()
        self.end_of_dataloader, self.remainder = False, self.batches.remainder
        gradients._add_dataloader(self)
        try:
            for batch in self.batches:
                self.end_of_dataloader = self.batches.at_end
                yield batch
        finally:
            gradients._remove_dataloader(self)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: each pass already has its own order, and an endless stream continues."""

    def state_dict(self) -> State:
        """Return the position after the last delivered batch, for all processes; all of them call it."""
        return self.batches.state_dict()

    def load_state_dict(self, state_dict: State) -> None:
        """Resume from a state, on any number of processes."""
        self.batches.load_state_dict(state_dict)

    def close(self) -> None:
        """Stop the workers."""
        self.batches.loader.close()


def _same(batch: Any) -> Any:
    return batch
