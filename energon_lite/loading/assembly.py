"""Assembly of a data set: from the arguments of a call to its leaves and their order, and from these and the hooks to
planned batches, or to chunks if batches are content-decided."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from energon_lite.batching.plan import ChunkPlan, FixedPlan, default_chunk_size
from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.config.metadataset import is_metadataset, multiply_epochs
from energon_lite.entry_points import blend_openers, load
from energon_lite.errors import EmptyDatasetError, UsageError, counted
from energon_lite.hooks import TaskEncoder, check_hooks, hooks_of, is_overridden
from energon_lite.loading.iterators.dataset import Identity, LeafIdentity, SavableDataset
from energon_lite.loading.iterators.planned_dataset import PlanCursor, PlannedDataset
from energon_lite.loading.leaves import PathOrDict, find_leaves, open_leaves
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.metadataset_keys import OpenedBlend, blend_of_leaves
from energon_lite.loading.options import ByTokens, Chunks, Reading
from energon_lite.order.hashing import HashDomain, hash_ints
from energon_lite.order.orders import BlendOrder, ConcatOrder, EpochBlendOrder, Order
from energon_lite.order.shuffle import LeafOrders
from energon_lite.storage.index.columns import SKIP
from energon_lite.storage.read.runs import read_in_runs
from energon_lite.trust import trusts
from energon_lite.worker_config import WorkerConfig, whole_numbers

if TYPE_CHECKING:
    from energon_lite.loading.iterators.lane_dataset import LaneDataset
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
        return _checked(_by_encoded_tokens(order, identity, chunks, tokens, **common))
    hooks = hooks_of(encoder, packing=packing is not None, batched=tokens is not None or batch_size is not None)
    if tokens is None and hooks.content_decides:
        return _checked(_by_content(order, identity, chunks, batch_size, packing, groups=hooks.groups, **common))
    for name, value in (("chunk_size", chunks.size), ("chunk_remainder", chunks.remainder), ("lanes", chunks.lanes)):
        if value is not None:
            raise UsageError(
                f"{name}={value!r} has no effect: the batches of this task encoder are planned without chunks, and a "
                "run can be resumed on any number of ranks",
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
            f"{counted(samples, 'sample')} for {world} data-parallel ranks: not all of them would get one",
            where=_names(dataset),
            fix=f"use at most {counted(samples, 'data-parallel rank')}, or more data; or, in training, repeat=True",
        )
    return dataset


def _samples(dataset: SavableDataset) -> int | None:
    """Return the number of samples in a pass; None: the pass does not end."""
    bounds = dataset.plan.order.bounds(0)
    return None if bounds is None else bounds[1] - bounds[0]


def _names(dataset: SavableDataset) -> str:
    return ", ".join(leaf.name for leaf in dataset.leaves[:3]) + (" and others" if len(dataset.leaves) > 3 else "")


def _by_content(
    order: Order,
    identity: Identity,
    chunks: Chunks,
    batch_size: int | None,
    buffer: int | None,
    *,
    groups: bool,
    **common: Any,
) -> LaneDataset:
    """Return a data set whose hooks decide how many samples there are; ``buffer``: samples in a buffer of packing."""
    from energon_lite.batching.best_fit_decreasing import PACK_VERSION
    from energon_lite.loading.makers.sample_length import pack_selection

    # With groups, the samples of a rare group would be handed over from chunk to chunk without end.
    pushback = chunks.remainder in (None, "carry") and not groups
    carries = pushback and batch_size is not None
    if chunks.remainder == "carry" and not carries:
        raise UsageError(
            'chunk_remainder="carry" needs batches of batch_size samples, without batch_group_criterion',
            fix='give "keep" or "drop"',
        )
    size = chunks.size
    selection = None if buffer is None else pack_selection(common["task_encoder"])
    if size is None:
        size = default_chunk_size(batch_size, buffer, endless=order.bounds(0) is None, carries=carries)
    pushback = pushback and buffer is not None
    keeps = chunks.remainder == "keep" or (chunks.remainder != "drop" and not common.get("drop_last"))
    plan = ChunkPlan(order, batch_size, size, buffer, keep_remainder=keeps, carries=carries, pushback=pushback)
    settings = {
        "packing_buffer_size": buffer,
        "chunk_size": size,
        "chunk_remainder": "carry" if carries else "keep" if plan.keep_remainder else "drop",
        "groups": groups,
        **({"pushback": "carry"} if pushback else {}),
        **({} if selection is None else {"pack_capacity": selection.capacity, "pack_version": PACK_VERSION}),
    }
    return _in_lanes(plan, identity, settings, chunks, **common)


def _by_encoded_tokens(
    order: Order, identity: Identity, chunks: Chunks, tokens: TokenBatching, **common: Any
) -> LaneDataset:
    """Return a data set with batches by tokens whose lengths are known after samples are encoded."""
    from energon_lite.loading.makers.chunk_bundles import BundlesByTokens

    if chunks.remainder is not None:
        raise UsageError(
            f"chunk_remainder={chunks.remainder!r} has no effect with batching", fix="leave out chunk_remainder"
        )
    encoder = common["task_encoder"]
    if is_overridden(encoder, "batch_group_criterion"):
        raise UsageError(
            f"{type(encoder).__name__}.batch_group_criterion together with batching: both decide what makes up a batch",
            fix="leave out one of them",
        )
    assert tokens.plan_chunk is not None  # it has a default if there is no column
    settings = {**tokens.settings(), "length_field": tokens.length_field, "plan_chunk": tokens.plan_chunk}
    bundler = BundlesByTokens(tokens.strategy, encoder, tokens.length_field)
    plan = ChunkPlan(order, None, tokens.plan_chunk)
    return _in_lanes(plan, identity, settings, chunks, bundler=bundler, **common)


def _in_lanes(
    plan: ChunkPlan, identity: Identity, settings: dict[str, Any], chunks: Chunks, **common: Any
) -> LaneDataset:
    """Return a data set that is worked on in chunks; ``settings`` decide the batches of a chunk."""
    from energon_lite.loading.iterators.lane_cursor import check_topology
    from energon_lite.loading.iterators.lane_dataset import LaneDataset

    if chunks.lanes is not None:
        check_topology(chunks.lanes, common["worker_config"].world_size)
    # No rank knows the progress of other ranks' lanes, so it does not know which stages have begun: all stages count.
    identity = identity.whole()
    identity = replace(identity, settings={**identity.settings, **settings})
    return LaneDataset(plan=plan, lanes=chunks.lanes, identity=identity, **common)


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
        for name, kind in (("worker_config", WorkerConfig), ("chunks", Chunks), ("reading", Reading)):
            if not isinstance(given := getattr(self, name), kind):
                raise UsageError(f"{name} is {given!r}", fix=f"give a {kind.__name__}(...)")
        self.batch_size, self.packing, size, lanes = whole_numbers(
            batch_size=self.batch_size,
            packing_buffer_size=self.packing,
            chunk_size=self.chunks.size,
            lanes=self.chunks.lanes,
        )
        self.chunks = replace(self.chunks, size=size, lanes=lanes)
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
