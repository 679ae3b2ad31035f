"""From what is asked for to a data set: which leaves, in which order, made how."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from energon_lite.config.metadataset import LeafSpec, is_metadataset, multiply_epochs
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
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.trust import trusts
from energon_lite.worker_config import WorkerConfig

__all__ = ["DatasetRequest", "find_specs"]

#: Keeps the hashes for different purposes apart.
_BLEND = 22

#: So many samples are refused: positions have to stay below 2**62 for a few thousand epochs at least.
_LONGEST_EPOCH = 2.0**50


@dataclass
class DatasetRequest:
    """Arguments that data sets have in common, checked before a file is read, and the data sets that they make.

    Args:
        split_part, worker_config, batch_size, drop_last, encoder, batching, chunks, reading: those of
            :func:`~energon_lite.get_train_dataset`.
        packing: samples from which packs are selected; None: nothing is packed by hooks.
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
    #: What is read, as arguments of ``energon-lite measure``; empty: leaf by leaf.
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
        """A blend without end, or by epochs; arguments as those of :func:`~energon_lite.get_train_dataset`."""
        self.asked = self._arguments(path)
        blend = self.blend(path, run=run if window else None, window=window)  # one alone has no effect
        leaves = blend.leaves
        stages = blend.stages
        repetitions = blend.repetitions
        weights = blend.stages[0].weights
        multipliers = [multiply_epochs(copies, one) for one in blend.multipliers]
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
        """The leaves one after the other.

        Args:
            kind: what for; part of the identity.
            run: neighbours that are read together from slow storage.
            how: whether it is limited, or gone through once.
        """
        self.asked = () if isinstance(path, LeafSpec) else self._arguments(path)
        leaves, identities = self.open(find_specs(path, self.split_part, self.reading), run=run, window=run)
        order = ConcatOrder([len(leaf.source) for leaf in leaves])
        return self.dataset(order, Identity(self.settings(kind), identities), leaves, refill=False, weights=None, **how)

    def blend(self, path: PathOrDict, run: int | None, window: int | None) -> OpenedBlend:
        """The leaves of a blend; those of a very large one are opened when they are read."""
        find = partial(find_specs, path, self.split_part, self.reading)
        if self.tokens is not None and self.tokens.length_column is not None:
            found: OpenedBlend | Sequence[LeafSpec] = find()  # plans are made by what is in the files of all leaves
        else:
            found = blend_of_many(path, self.encoder, self.reading, self.split_part, find, run=run, window=window)
        if not isinstance(found, OpenedBlend):
            found = blend_of_leaves(found, *self.open(found, run=run, window=window))
        return found

    def open(
        self, specs: Sequence[LeafSpec], run: int | None, window: int | None
    ) -> tuple[tuple[Leaf, ...], tuple[LeafIdentity, ...]]:
        skips = self.reading.use_measured_skips
        column = SKIP if skips is True else skips or None
        leaves, identities = open_leaves(
            specs, self.encoder, trusts(self.reading.trust_code), column, self.reading.sample_type, asked=self.asked
        )
        every = [one for leaf in leaves for one in getattr(leaf.source, "members", (leaf.source,))]
        folders = [source for source in every if isinstance(source, WebdatasetSource)]
        read_in_runs(folders, self.reading.read_ahead, run=run, window=window)
        return leaves, tuple(identities)

    def _arguments(self, path: PathOrDict) -> list[str]:
        """A metadataset as it is measured: all of its leaves in a split. Nothing for others."""
        if not isinstance(path, (str, os.PathLike)) or not is_metadataset(path):
            return []
        labels = ["--subflavors", json.dumps(self.reading.labels, default=str)] if self.reading.labels else []
        return [os.path.abspath(os.path.expanduser(path)), "--split-parts", self.split_part, *labels]

    def settings(self, kind: str) -> dict[str, Any]:
        """For the identity: what decides the order, beside the leaves."""
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
        """The data set: of batches by tokens, or of a number of samples."""
        common |= {"leaves": leaves, "task_encoder": self.encoder, "worker_config": self.worker_config}
        batch_size = self.batch_size
        return assembled(order, identity, self.chunking, self.tokens, batch_size=batch_size, refill=refill, **common)


def find_specs(path: PathOrDict | LeafSpec, split_part: str, reading: Reading) -> Sequence[LeafSpec]:
    """The leaves that a path stands for, as the documents describe them, with a filter of the call behind theirs."""
    if isinstance(path, LeafSpec):
        return [path]
    specs = find_leaves(path, split_part, reading.dataset_config, reading.split_config, reading.labels)
    return specs if reading.filter is None else [replace(one, filters=(*one.filters, reading.filter)) for one in specs]


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
