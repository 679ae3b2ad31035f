"""From the arguments of a call to a data set: its leaves, their order, and the making of samples."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.config.metadataset import is_metadataset, multiply_epochs
from energon_lite.errors import UsageError
from energon_lite.hooks import TaskEncoder, check_hooks
from energon_lite.loading.assembly import Chunking, assembled
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.identity import Identity, LeafIdentity
from energon_lite.loading.leaves import PathOrDict, find_leaves, open_leaves
from energon_lite.loading.makers.pipeline import Leaf
from energon_lite.loading.opened_blend import OpenedBlend, blend_of_leaves, blend_of_many
from energon_lite.loading.options import ByTokens, Chunks, Reading
from energon_lite.loading.stages import StagedIdentity
from energon_lite.loading.token_batching import TokenBatching, token_batching
from energon_lite.order.hashing import hash_ints
from energon_lite.order.orders import BlendOrder, ConcatOrder, EpochBlendOrder, Order
from energon_lite.order.shuffle import LeafOrders
from energon_lite.storage.index.columns import SKIP
from energon_lite.storage.read.run_reader import read_in_runs
from energon_lite.trust import trusts
from energon_lite.worker_config import WorkerConfig

__all__ = ["DatasetRequest", "find_specs"]

#: Tag that separates the hashes of this purpose from those of others.
_BLEND = 22

#: Samples of an epoch from which on it is refused: positions must stay below 2**62 for at least a few thousand epochs.
_LONGEST_EPOCH = 2.0**50


@dataclass
class DatasetRequest:
    """Common arguments of data sets, checked before a file is read, and the making of data sets from them.

    Args:
        split_part, worker_config, batch_size, drop_last, encoder, batching, chunks, reading: those of
            :func:`~energon_lite.get_train_dataset`.
        packing: samples in a buffer of packing; None: hooks do not pack.
    """

    split_part: str
    worker_config: WorkerConfig
    batch_size: int | None
    drop_last: bool
    packing: int | None
    encoder: TaskEncoder
    batching: ByTokens | None
    chunks: Chunks
    reading: Reading
    tokens: TokenBatching | None = field(default=None, init=False)
    chunking: Chunking = field(init=False)
    #: The path and its options as arguments of ``energon-lite measure``; empty: leaf by leaf.
    asked: Sequence[str] = field(init=False, default=())

    def __post_init__(self) -> None:
        check_hooks(self.encoder, packing_buffer_size=self.packing)
        size = self.chunks.size
        if self.batching is not None:
            self.tokens = token_batching(self.batching, size, self.batch_size, self.packing)
            size = None
        self.chunking = Chunking(self.packing, size, self.chunks.remainder, self.chunks.lanes, self.drop_last)

    def mixed(
        self, path: PathOrDict, repeat: bool, run: int | None, window: int | None, copies: int | None, loop_length: int
    ) -> SavableDataset:
        """Return an endless blend, or one by epochs; arguments as those of :func:`~energon_lite.get_train_dataset`."""
        self.asked = self._arguments(path)
        blend = self.blend(path, run=run if window else None, window=window)  # a run needs a window
        leaves = blend.leaves
        stages = blend.stages
        repetitions = blend.repetitions
        weights = blend.stages[0].weights
        multipliers = [multiply_epochs(copies, multiplier) for multiplier in blend.multipliers]
        seed = self.worker_config.seed_offset
        orders = LeafOrders.seeded(blend.lengths, blend.keys, multipliers, seed)
        mixed: dict[str, Any] = {"key": hash_ints(seed, _BLEND), "run": run, "window": window}
        settings = self.settings("train")
        settings |= {"shuffle_buffer_size": window, "max_samples_per_sequence": run, "repeat": repeat}
        if repetitions:
            _check_epoch(leaves, repetitions)
            order: Order = EpochBlendOrder(orders, repetitions, **mixed, repeat=repeat)
            settings["blend"] = "repetitions"
        else:
            length = _length_of_pass(leaves, repeat)
            order = BlendOrder(orders, weights if len(stages) == 1 else stages, **mixed, length=length)
        share, values = (("repetitions",), repetitions) if repetitions else ((), weights)
        identities = blend.identities(lambda number: (*share, values[number], multipliers[number]))
        identity = Identity(settings, identities)
        if len(stages) > 1:
            identity = StagedIdentity(settings, identities, stages=stages)
        return self.dataset(
            order,
            identity,
            leaves,
            refill=True,
            weights=None if repetitions else weights,
            loop_length=loop_length,
            repetitions=repetitions or None,
            stages=stages if len(stages) > 1 else (),
        )

    def in_order(self, kind: str, path: PathOrDict | LeafSpec, run: int | None, **how: Any) -> SavableDataset:
        """Return a data set of the leaves one after the other.

        Args:
            kind: purpose of the data set; part of the identity.
            run: number of neighbours that are read together from slow storage.
            how: options for a limit, or for a single pass.
        """
        self.asked = () if isinstance(path, LeafSpec) else self._arguments(path)
        leaves, identities = self.open(find_specs(path, self.split_part, self.reading), run=run, window=run)
        order = ConcatOrder([len(leaf.source) for leaf in leaves])
        return self.dataset(order, Identity(self.settings(kind), identities), leaves, refill=False, weights=None, **how)

    def blend(self, path: PathOrDict, run: int | None, window: int | None) -> OpenedBlend:
        """Return the leaves of a blend; those of a very large blend are opened when they are read."""
        find = partial(find_specs, path, self.split_part, self.reading)
        if self.tokens is not None and self.tokens.length_column is not None:
            blend: OpenedBlend | Sequence[LeafSpec] = find()  # plans depend on the files of all leaves
        else:
            blend = blend_of_many(path, self.encoder, self.reading, self.split_part, find, run=run, window=window)
        if not isinstance(blend, OpenedBlend):
            blend = blend_of_leaves(blend, *self.open(blend, run=run, window=window))
        return blend

    def open(
        self, specs: Sequence[LeafSpec], run: int | None, window: int | None
    ) -> tuple[tuple[Leaf, ...], tuple[LeafIdentity, ...]]:
        skips = self.reading.use_measured_skips
        column = SKIP if skips is True else skips or None
        leaves, identities = open_leaves(
            specs, self.encoder, trusts(self.reading.trust_code), column, self.reading.sample_type, asked=self.asked
        )
        folders = [member for leaf in leaves for member in leaf.source.members]
        read_in_runs(folders, self.reading.read_ahead, run=run, window=window)
        return leaves, tuple(identities)

    def _arguments(self, path: PathOrDict) -> list[str]:
        """Return a metadataset as arguments for measuring its leaves in a split; an empty list for other paths."""
        if not isinstance(path, (str, os.PathLike)) or not is_metadataset(path):
            return []
        labels = ["--subflavors", json.dumps(self.reading.labels, default=str)] if self.reading.labels else []
        return [os.path.abspath(os.path.expanduser(path)), "--split-parts", self.split_part, *labels]

    def settings(self, kind: str) -> dict[str, Any]:
        """Return the settings of the identity: what decides the order, in addition to the leaves."""
        return {
            "kind": kind,
            "split_part": self.split_part,
            "batch_size": self.batch_size,
            "batch_drop_last": self.drop_last,
            "seed": self.worker_config.seed_offset,
        }

    def dataset(
        self, order: Order, identity: Identity, leaves: Sequence[Leaf], *, refill: bool, **common: Any
    ) -> SavableDataset:
        """Return the data set: of batches by tokens, or of batches of a number of samples."""
        common |= {"leaves": leaves, "task_encoder": self.encoder, "worker_config": self.worker_config}
        batch_size = self.batch_size
        return assembled(order, identity, self.chunking, self.tokens, batch_size=batch_size, refill=refill, **common)


def find_specs(path: PathOrDict | LeafSpec, split_part: str, reading: Reading) -> Sequence[LeafSpec]:
    """Return the leaves of a path as the documents describe them; a filter of the call is added after their own."""
    if isinstance(path, LeafSpec):
        return [path]
    specs = find_leaves(path, split_part, reading.dataset_config, reading.split_config, reading.labels)
    return (
        specs if reading.filter is None else [replace(spec, filters=(*spec.filters, reading.filter)) for spec in specs]
    )


def _length_of_pass(leaves: Sequence[Leaf], repeat: bool) -> int | None:
    if repeat:
        return None
    if len(leaves) > 1:
        raise UsageError(
            "repeat=False with a blend by weight: its leaves end at different times",
            fix="give a single data set or a blend_epochized, or keep repeat=True and set virtual_epoch_length",
        )
    return len(leaves[0].source)


def _check_epoch(leaves: Sequence[Leaf], repetitions: Sequence[float]) -> None:
    samples = sum(leaf.length * repetition for leaf, repetition in zip(leaves, repetitions, strict=True))
    if not 1 <= samples < _LONGEST_EPOCH:
        raise UsageError(
            f"an epoch of the blend would have {samples:.6g} samples",
            where=", ".join(leaf.name for leaf in leaves[:3]),
            fix="write larger repetitions" if samples < 1 else "write smaller repetitions",
        )
