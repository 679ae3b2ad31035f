"""Megatron-LM and Megatron-Bridge: loaders for ``dataloader_type="external"``, roles from ``parallel_state``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from energon_lite.errors import StateMismatchError, TopologyError, UsageError, check_choice
from energon_lite.extras.frameworks.trainer_loader import common_state
from energon_lite.imports import optional_imports
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.lane_dataset import LaneDataset
from energon_lite.loading.iterators.state import State
from energon_lite.loading.savable_loader import SavableDataLoader
from energon_lite.loading.saved_states import read_state_files
from energon_lite.topology import Replica, Stages
from energon_lite.worker_config import WorkerConfig

__all__ = ["DataIterator", "data_iterators", "worker_config"]


def worker_config(
    *,
    num_workers: int = 4,
    all_tensor_ranks: bool = False,
    stages: Stages = "ends",
    last_stage_fields: Sequence[str] | None = None,
    **settings: Any,
) -> WorkerConfig:
    """Return this rank's worker config, from ``megatron.core.parallel_state``.

    Args:
        all_tensor_ranks: True if each rank of a tensor-parallel group loads the same data, as in Megatron-Bridge.
            Otherwise the first rank loads, and Megatron-LM's ``get_batch`` sends the batch to the others.
        stages, last_stage_fields: see ``WorkerConfig.from_mesh``.
        settings: further fields of :class:`~energon_lite.WorkerConfig`, such as ``seed_offset``.

    Raises:
        TopologyError: Megatron's groups are not initialized yet.
        UsageError: megatron-core is not installed, or an argument is invalid.
    """
    check_choice("stages", stages, get_args(Stages))
    with optional_imports("megatron", "importing megatron.core"):
        from megatron.core import parallel_state as groups
    if not groups.model_parallel_is_initialized():
        raise TopologyError("Megatron's groups are not there yet", fix="call initialize_model_parallel() before")
    tensor_rank, part = groups.get_tensor_model_parallel_rank(), groups.get_context_parallel_rank()
    replica = Replica(
        coordinates={"pp": groups.get_pipeline_model_parallel_rank(), "cp": part, "tp": tensor_rank},
        stages=groups.get_pipeline_model_parallel_world_size(),
        stages_with_data=stages,
        last_stage_fields=None if last_stage_fields is None else tuple(last_stage_fields),
    )
    return WorkerConfig(
        rank=groups.get_data_parallel_rank(),
        world_size=groups.get_data_parallel_world_size(),
        num_workers=num_workers,
        data_parallel_group=groups.get_data_parallel_group(),
        loads_data=replica.needs_data and (all_tensor_ranks or tensor_rank == 0),
        saves_state=replica.is_first,
        replica=replica,
        **settings,
    )


class DataIterator:
    """Iterator of a loader's micro-batches for Megatron.

    Args:
        cyclic: True to continue with the next pass after the last batch. False to stop there, until ``iter()``.
    """

    def __init__(self, loader: SavableDataLoader, *, cyclic: bool = True):
        self.loader = loader
        self.cyclic = cyclic
        self._batches: Iterator[Any] | None = iter(loader)

    def __iter__(self) -> DataIterator:
        self._batches = self._batches or iter(self.loader)
        return self

    def __next__(self) -> Any:
        for _ in range(2):
            for batch in self._batches or ():
                return batch
            self._batches = iter(self.loader) if self.cyclic else None
        if self.cyclic:
            raise UsageError("a pass of the loader has no batch", where=str(self.loader), fix="give it more samples")
        raise StopIteration

    def __len__(self) -> int:
        return len(self.loader)

    def save_state(self) -> State:
        """Return the state of all data-parallel ranks, on each. Megatron calls it on all, with its checkpoint."""
        return common_state(self.loader)


def data_iterators(
    train: Any,
    valid: Any = None,
    test: Any = None,
    *,
    micro_batch_size: int,
    progress: Any = None,
    states: str | os.PathLike[str] | None = None,
    cyclic: bool = True,
) -> tuple[Any, Any, Any]:
    """Make three :class:`DataIterator` for a ``train_valid_test_datasets_provider``; None on ranks without data.

    Args:
        train, valid, test: data sets made with :func:`worker_config`, savable loaders of them, lists of them, or None.
        micro_batch_size: number of samples that Megatron counts per micro-batch.
        progress: progress of the run: Megatron-LM's ``args``, or Bridge's ``TrainState``; None at its beginning.
        states: the folder of ``dataloader_save``. Without it, or without a state of this iteration in it, the loader is
            set to the position in ``consumed_train_samples``. Validation is set by ``consumed_valid_samples`` or, for
            content-decided batches, restarts.

    Raises:
        StateError, StateMismatchError: the state is damaged, of other data, or at another position than the run.
        UsageError: there is no state, and batches are content-decided, so a count of samples does not determine a
            position.
    """
    trained, validated = (getattr(progress, f"consumed_{name}_samples", 0) for name in ("train", "valid"))
    iteration = getattr(progress, "iteration", getattr(progress, "step", 0))
    files = [] if states is None else Path(states, f"iter_{iteration:07d}").rglob("train_dataloader_dprank000.pt")
    newest = max(files, key=os.path.getmtime, default=None) if iteration else None
    saved = None if newest is None else read_state_files([newest])[0].state

    def iterator(data: Any, consumed: int = 0, saved: State | None = None, *, in_training: bool = True) -> Any:
        if isinstance(data, (list, tuple)):
            # Megatron counts the samples of all validation sets together, equal numbers of each but in full passes.
            each = (
                0 if getattr(progress, "full_validation", False) else consumed // (max(1, len(data)) * micro_batch_size)
            )
            share = consumed if in_training else each * micro_batch_size
            return [iterator(part, share, saved, in_training=in_training) for part in data]
        if data is None or not data.worker_config.loads_data:
            return None
        loader = SavableDataLoader(data) if isinstance(data, SavableDataset) else data
        place, rest = divmod(consumed, micro_batch_size)
        if rest:
            raise UsageError(f"{consumed} consumed samples do not fill micro-batches of {micro_batch_size}")
        if saved is not None:
            loader.restore_state_rank(saved)
            position = loader.state_dict()["position"]
            if position != place and loader.dataset.resolved.is_endless:
                raise StateMismatchError(f"the saved loader is at micro-batch {position}, but the run is at {place}")
        elif place and (in_training or not isinstance(loader.dataset.resolved, LaneDataset)):
            loader.restore_state_rank(loader.state_at(place))
        return DataIterator(loader, cyclic=cyclic)

    return iterator(train, trained, saved), iterator(valid, validated, in_training=False), iterator(test)
