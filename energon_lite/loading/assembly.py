"""Assembly of a data set: from the arguments of a call to its leaves and their order, and from these and the hooks to
planned batches, or to chunks if batches are content-decided."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.batching.plan import FixedPlan
from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.config.metadataset import is_metadataset, multiply_epochs
from energon_lite.entry_points import blend_openers, load
from energon_lite.errors import EmptyDatasetError, UsageError
from energon_lite.hooks import TaskEncoder, check_hooks, hooks_of
from energon_lite.loading.iterators.dataset import Identity, LeafIdentity, SavableDataset
from energon_lite.loading.iterators.planned_dataset import PlanCursor, PlannedDataset
from energon_lite.loading.leaves import PathOrDict, find_leaves, open_leaves
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.metadataset_keys import BlendSchedule, by_samples, find_schedule
from energon_lite.loading.options import ByTokens, Chunks, Reading
from energon_lite.order.hashing import HashDomain, hash_ints
from energon_lite.order.orders import BlendOrder, ConcatOrder, EpochBlendOrder, Order
from energon_lite.order.shuffle import LeafOrders
from energon_lite.storage.index.columns import SKIP
from energon_lite.storage.read.runs import read_in_runs
from energon_lite.trust import trusts
from energon_lite.worker_config import WorkerConfig

if TYPE_CHECKING:
    from energon_lite.loading.token_batching import TokenBatching

#: Tag that separates the hashes of this purpose from those of others.
_HOOKS = HashDomain.HOOKS.value


def assembled(
    order: Order,
    identity: Identity,
    chunks: Chunks,
    tokens: TokenBatching | None,
    *,
    batch_size: int | None,
    refill: bool,
    packing: int | None = None,
    **common: Any,
) -> SavableDataset:
    """Return a data set.

    Args:
        tokens: settings of batches by tokens; None: batches of ``batch_size`` samples.
        refill: replace samples that fail, if batches of a fixed size are planned.
        packing: samples in a buffer of packing; None: hooks do not pack.
        common: fields of :class:`~energon_lite.loading.iterators.dataset.SavableDataset`.

    Raises:
        UsageError: arguments that contradict each other, or missing lengths.
        TopologyError: lanes, or the micro-batches of a step, cannot be divided among the ranks.
        EmptyDatasetError: a pass has too few samples.
    """
    encoder = common["task_encoder"]
    config = common["worker_config"]
    common["seed"] = hash_ints(config.seed_offset, _HOOKS)
    if tokens is not None and tokens.length_column is None:
        from energon_lite.loading.content_decided import by_encoded_tokens

        return _checked(by_encoded_tokens(order, identity, chunks, tokens, **common))
    hooks = hooks_of(encoder, packing=packing is not None, batched=tokens is not None or batch_size is not None)
    if tokens is None and hooks.content_decides:
        from energon_lite.loading.content_decided import by_content

        return _checked(by_content(order, identity, chunks, batch_size, packing, groups=hooks.groups, **common))
    for name, value in (("chunk_size", chunks.size), ("chunk_remainder", chunks.remainder), ("lanes", chunks.lanes)):
        if value is not None:
            raise UsageError(
                f"{name}={value!r} has no effect: the batches of this task encoder are planned, "
                "without chunks, and go on on any number of ranks",
                fix=f"leave out {name}",
            )
    if tokens is not None:
        from energon_lite.loading.token_batching import plan_by_tokens

        token_plan, identity = plan_by_tokens(
            order, identity, tokens, leaves=common["leaves"], encoder=encoder, config=config
        )
        return PlannedDataset(plan=token_plan, identity=identity, **common)
    plan = FixedPlan(order, batch_size, drop_last=common.get("drop_last", False))
    dataset = PlannedDataset(plan=plan, identity=identity, batched=batch_size is not None, refill=refill, **common)
    _checked(dataset)
    if dataset.step(PlanCursor(plan.start)) is None:
        raise EmptyDatasetError(
            f"{_samples(dataset)} samples do not fill one batch of {batch_size} on each of {config.world_size} ranks, "
            "and batch_drop_last leaves out the rest",
            where=_names(dataset),
            fix="use smaller batches, fewer ranks, or batch_drop_last=False",
        )
    return dataset


def _checked(dataset: SavableDataset) -> SavableDataset:
    """Refuse passes in which some rank would get no sample; return the data set."""
    samples = _samples(dataset)
    world = dataset.worker_config.world_size
    if samples is not None and samples < world and not dataset.once:
        raise EmptyDatasetError(
            f"{samples} samples for {world} data-parallel ranks: not all of them would get one",
            where=_names(dataset),
            fix=f"use at most {samples} data-parallel ranks, more data, or repeat=True",
        )
    return dataset


def _samples(dataset: SavableDataset) -> int | None:
    """Return the number of samples in a pass; None: the pass does not end."""
    bounds = dataset.plan.order.bounds(0)
    return None if bounds is None else bounds[1] - bounds[0]


def _names(dataset: SavableDataset) -> str:
    return ", ".join(leaf.name for leaf in dataset.leaves[:3]) + (" and others" if len(dataset.leaves) > 3 else "")


#: Tag that separates the hashes of this purpose from those of others.
_BLEND = HashDomain.BLEND.value

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
    #: The path and its options as arguments of ``energon-lite measure``; empty: leaf by leaf.
    asked: Sequence[str] = field(init=False, default=())

    def __post_init__(self) -> None:
        check_hooks(self.encoder, packing_buffer_size=self.packing)
        if self.batching is not None:
            from energon_lite.loading.token_batching import token_batching

            self.tokens = token_batching(self.batching, self.chunks.size, self.batch_size, self.packing)
            self.chunks = replace(self.chunks, size=None)

    def mixed(
        self, path: PathOrDict, repeat: bool, run: int | None, window: int | None, copies: int | None, loop_length: int
    ) -> SavableDataset:
        """Return an endless blend, or one by epochs; arguments as those of :func:`~energon_lite.get_train_dataset`."""
        self.asked = self._arguments(path)
        blend = self.blend(path, run=run if window else None, window=window)  # a run needs a window
        leaves = blend.leaves
        schedule = blend.schedule
        repetitions = blend.repetitions
        weights = blend.weights
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
            order = BlendOrder(orders, weights if schedule is None else schedule, **mixed, length=length)
        share, values = (("repetitions",), repetitions) if repetitions else ((), weights)
        identities = blend.identities(lambda number: (*share, values[number], multipliers[number]))
        identity = Identity(settings, identities) if schedule is None else schedule.identity(settings, identities)
        return self.dataset(
            order,
            identity,
            leaves,
            refill=True,
            weights=None if repetitions else weights,
            loop_length=loop_length,
            repetitions=repetitions or None,
            stages=1 if schedule is None else schedule.count,
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
        """Return the leaves of a blend, opened here or by a guest."""
        find = cache(partial(find_specs, path, self.split_part, self.reading))
        if self.tokens is None or self.tokens.length_column is None:  # else plans depend on the files of all leaves
            request = BlendRequest(path, self.encoder, self.reading, self.split_part, run, window, find)
            for target in blend_openers().values():
                blend: OpenedBlend | None = load(target)(request)
                if blend is not None:
                    return blend
        specs = find()
        return blend_of_leaves(specs, *self.open(specs, run=run, window=window))

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
        common |= {"batch_size": self.batch_size, "packing": self.packing, "drop_last": self.drop_last}
        return assembled(order, identity, self.chunks, self.tokens, refill=refill, **common)


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


#: Function that returns the settings of a leaf for its identity, by its number.
Settings = Callable[[int], tuple[Any, ...]]


@dataclass(frozen=True)
class OpenedBlend:
    """Leaves of a blend, and the properties that its order depends on.

    Args:
        leaves: the leaves, ready for reading.
        lengths, keys: ``[leaves]`` int64 and uint64, of each leaf.
        multipliers: ``shuffle_over_epochs_multiplier`` of each leaf.
        repetitions: repetitions of each leaf; empty in a blend by weight.
        weights: share of each leaf at the start of the run.
        schedule: the shares during the run, if they change.
        identities: returns the identity of each leaf, given their settings.
    """

    leaves: Sequence[Leaf]
    lengths: NDArray[np.int64]
    keys: NDArray[np.uint64]
    multipliers: Sequence[int | None]
    repetitions: tuple[float, ...]
    weights: tuple[float, ...]
    schedule: BlendSchedule | None
    identities: Callable[[Settings], Sequence[LeafIdentity]]


class BlendRequest(NamedTuple):
    """Arguments of a guest that opens blends (table ``BLEND_OPENERS``).

    Attributes:
        path: path of the document, or another argument for leaves.
        encoder: the user's hooks.
        reading, split_part: settings that decide the leaves and their samples.
        run, window: see :func:`~energon_lite.storage.read.runs.read_in_runs`.
        find: function that finds the leaves; it reads the documents at its first call only.
    """

    path: PathOrDict
    encoder: TaskEncoder
    reading: Reading
    split_part: str
    run: int | None
    window: int | None
    find: Callable[[], Sequence[LeafSpec]]


def blend_of_leaves(
    specs: Sequence[LeafSpec], leaves: Sequence[Leaf], identities: Sequence[LeafIdentity]
) -> OpenedBlend:
    """Return the blend of open leaves.

    Raises:
        ConfigError, DataIndexError: as :func:`~energon_lite.loading.metadataset_keys.by_samples`.
    """
    specs = by_samples(specs, [leaf.source for leaf in leaves])
    return OpenedBlend(
        leaves,
        np.array([leaf.length for leaf in leaves], dtype=np.int64),
        np.array([leaf.key for leaf in leaves], dtype=np.uint64),
        [spec.shuffle_over_epochs_multiplier for spec in specs],
        tuple(spec.repetitions for spec in specs if spec.repetitions is not None),  # set for all leaves or none
        tuple(spec.weight for spec in specs),
        find_schedule(specs),
        lambda settings: tuple(
            replace(identity, settings=settings(number)) for number, identity in enumerate(identities)
        ),
    )
