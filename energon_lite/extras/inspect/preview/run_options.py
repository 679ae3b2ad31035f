"""Options of the previewed run, from the command line or from a saved state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from energon_lite.errors import StateError
from energon_lite.hooks import TaskEncoder
from energon_lite.loading.found_leaves import FoundLeaves
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.options import ByTokens, Chunks, Reading
from energon_lite.loading.recipes import get_train_dataset, get_val_dataset
from energon_lite.loading.states.files import read_state_files
from energon_lite.loading.states.merge import merged
from energon_lite.worker_config import WorkerConfig

__all__ = ["RunOptions"]

#: Splits that are read once, in order.
_READ_ONCE = ("val", "test")


@dataclass(frozen=True)
class RunOptions:
    """Arguments of ``get_train_dataset`` that determine the samples of a step.

    Args:
        split_part: the split; ``val`` and ``test`` are read in order, as in validation.
        ranks: data-parallel ranks; a step has a micro-batch for each.
        state: state of a run, which then determines all options except the ranks; see :meth:`of_state`.
    """

    split_part: str = "train"
    dataset_config: str = "dataset.yaml"
    split_config: str = "split.yaml"
    trust_code: bool = False
    batch_size: int | None = 8
    packing_buffer_size: int | None = None
    batching: Mapping[str, Any] | str | None = None
    length_column: str | None = "length"
    length_field: str | None = None
    micro_batches_per_step: int | None = None
    shuffle_buffer_size: int | None = None
    max_samples_per_sequence: int | None = None
    batch_drop_last: bool = False
    repeat: bool = True
    chunks: Chunks = field(default_factory=Chunks)
    seed: int = 0
    ranks: int = 1
    kind: str | None = None
    state: Mapping[str, Any] | None = None

    def of_state(self, path: str) -> RunOptions:
        """Return the options of the run in which a state was saved.

        Args:
            path: a file of a state, a checkpoint with one in it, or a folder of the states of all ranks.

        Raises:
            StateError: there is no state in the file, or one without settings.
        """
        files = read_state_files([path])
        state = merged([file.state for file in files], [file.name for file in files])
        settings = state.get("identity", {}).get("settings") if isinstance(state.get("identity"), Mapping) else None
        if not isinstance(settings, Mapping):
            raise StateError("the state does not say how its run was", where=path, fix="give the options themselves")
        same = (
            *("split_part", "batch_size", "batch_drop_last", "packing_buffer_size", "batching", "length_column"),
            *("length_field", "micro_batches_per_step", "shuffle_buffer_size", "max_samples_per_sequence", "repeat"),
            *("seed", "kind"),
        )
        given = {name: settings[name] for name in same if name in settings}
        if "batching" in given:
            given |= {"length_column": settings.get("length_column"), "batch_size": None}
        lanes = state.get("lanes") if state.get("kind") == "lanes" else None
        chunks = Chunks(
            size=settings.get("chunk_size", settings.get("plan_chunk")),
            remainder=settings.get("chunk_remainder"),
            lanes=lanes if isinstance(lanes, int) else None,
        )
        return replace(self, **given, chunks=chunks, state=state)

    def open(self, leaves: FoundLeaves, encoder: TaskEncoder) -> SavableDataset:
        """Open the data set of a run with these options.

        Raises:
            ConfigError, DatasetError, UsageError: as ``get_train_dataset``.
        """
        config = WorkerConfig(rank=0, world_size=self.ranks, num_workers=0, seed_offset=self.seed)
        batching = None
        if self.batching is not None:
            batching = ByTokens(self.batching, self.length_column, self.length_field, self.micro_batches_per_step)
        common: dict[str, Any] = {
            "split_part": self.split_part,
            "worker_config": config,
            "batch_size": None if batching is not None else self.batch_size,
            "batch_drop_last": self.batch_drop_last,
            "packing_buffer_size": self.packing_buffer_size,
            "task_encoder": encoder,
            "batching": batching,
            "chunks": self.chunks,
            "reading": Reading(
                dataset_config=self.dataset_config, split_config=self.split_config, trust_code=self.trust_code or None
            ),
        }
        if self.reads_once:
            return get_val_dataset(leaves, **common)
        return get_train_dataset(
            leaves,
            shuffle_buffer_size=self.shuffle_buffer_size,
            max_samples_per_sequence=self.max_samples_per_sequence,
            repeat=self.repeat,
            **common,
        )

    @property
    def reads_once(self) -> bool:
        """True if samples are read in order, once per pass, whatever the weights of the blend."""
        return self.kind == "val" if self.kind is not None else self.split_part in _READ_ONCE
