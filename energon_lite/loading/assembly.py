"""From an order, leaves and hooks to a data set: planned ahead, or in chunks where content decides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from energon_lite.batching.chunks import ChunkPlan, default_chunk_size
from energon_lite.batching.plan import FixedPlan
from energon_lite.errors import EmptyDatasetError, UsageError, nearest
from energon_lite.hooks import TaskEncoder, hooks_of
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.identity import Identity
from energon_lite.loading.iterators.lane_cursor import MAX_LANES, check_topology
from energon_lite.loading.iterators.lane_dataset import LaneDataset
from energon_lite.loading.iterators.planned_dataset import Cursor, PlannedDataset
from energon_lite.order.hashing import hash_ints
from energon_lite.order.orders import Order

__all__ = ["Chunking", "assembled", "chunked", "content_decides", "refuse_chunking"]

#: Keeps the hashes for different purposes apart.
_HOOKS = 23

_REMAINDERS = ("carry", "keep", "drop")


@dataclass(frozen=True)
class Chunking:
    """What the user said about packing and chunks; the arguments of the same names of ``get_train_dataset``."""

    packing_buffer_size: int | None = None
    chunk_size: int | None = None
    chunk_remainder: str | None = None
    lanes: int | None = None
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.chunk_remainder not in (None, *_REMAINDERS):
            close = nearest(self.chunk_remainder, _REMAINDERS)
            raise UsageError(
                f"chunk_remainder is {self.chunk_remainder!r}",
                fix=f"did you mean {close!r}?" if close else 'give "carry", "keep" or "drop"',
            )
        if self.lanes is not None and not 1 <= self.lanes <= MAX_LANES:
            raise UsageError(
                f"lanes is {self.lanes}",
                fix=f"give a multiple of the number of data-parallel ranks, at most {MAX_LANES}",
            )

    @property
    def keeps(self) -> bool:
        """Samples that do not fill a batch at a chunk's end, or at that of the pass, are kept."""
        return self.chunk_remainder == "keep" or (self.chunk_remainder != "drop" and not self.drop_last)


def content_decides(encoder: TaskEncoder, batch_size: int | None, chunking: Chunking) -> bool:
    """Whether nobody knows, before the hooks have run, how many batches there will be."""
    packing = chunking.packing_buffer_size is not None
    return hooks_of(encoder, packing=packing, batched=batch_size is not None).content_decides


def assembled(
    order: Order,
    identity: Identity,
    chunking: Chunking,
    *,
    batch_size: int | None,
    refill: bool,
    **common: Any,
) -> SavableDataset:
    """A data set.

    Args:
        refill: replace samples that fail, where batches are planned.
        common: fields of :class:`~energon_lite.loading.iterators.dataset.SavableDataset`.

    Raises:
        UsageError: arguments that do not go together.
        TopologyError: the lanes cannot be divided among the ranks.
        EmptyDatasetError: a pass has too few samples.
    """
    common["seed"] = hash_ints(common["worker_config"].seed_offset, _HOOKS)
    if not content_decides(common["task_encoder"], batch_size, chunking):
        refuse_chunking(chunking)
        plan = FixedPlan(order, batch_size, drop_last=chunking.drop_last)
        planned = PlannedDataset(
            plan=plan,
            batched=batch_size is not None,
            refill=refill,
            drop_last=chunking.drop_last,
            identity=identity,
            **common,
        )
        _check_length(planned)
        if planned.step(Cursor(plan.start)) is None:
            world = planned.worker_config.world_size
            raise EmptyDatasetError(
                f"{_samples(planned)} samples do not fill one batch of {batch_size} on each of {world} ranks, and "
                "batch_drop_last leaves out the rest",
                where=_names(planned),
                fix="use smaller batches, fewer ranks, or batch_drop_last=False",
            )
        return planned
    buffer, size = chunking.packing_buffer_size, chunking.chunk_size
    groups = hooks_of(common["task_encoder"], packing=buffer is not None, batched=batch_size is not None).groups
    # A rare group's samples would be handed from chunk to chunk without an end.
    carries = chunking.chunk_remainder in (None, "carry") and batch_size is not None and not groups
    if chunking.chunk_remainder == "carry" and not carries:
        raise UsageError(
            'chunk_remainder="carry" needs batches of batch_size samples, without batch_group_criterion',
            fix='give "keep" or "drop"',
        )
    endless = order.bounds(0) is None
    chunks = ChunkPlan(
        order,
        batch_size,
        default_chunk_size(batch_size, buffer, endless=endless, carries=carries) if size is None else size,
        packing_buffer_size=buffer,
        keep_remainder=chunking.keeps,
        carries=carries,
    )
    settings = {
        "packing_buffer_size": chunks.packing_buffer_size,
        "chunk_size": chunks.chunk,
        "chunk_remainder": "carry" if carries else "keep" if chunks.keep_remainder else "drop",
        "groups": groups,
    }
    return chunked(order, identity, chunking, chunks, settings=settings, **common)


def chunked(
    order: Order, identity: Identity, chunking: Chunking, chunks: ChunkPlan, *, settings: dict[str, Any], **common: Any
) -> LaneDataset:
    """A data set that is worked on in chunks.

    Args:
        chunks: what they are.
        settings: what decides the batches of a chunk, for the identity.
        common: other fields of the data set.

    Raises:
        TopologyError: the lanes cannot be divided among the ranks.
        EmptyDatasetError: a pass has too few samples.
    """
    if chunking.lanes is not None:
        check_topology(chunking.lanes, common["worker_config"].world_size)
    # No rank knows how far the lanes of the others are, hence which stages of weights began: all count.
    dataset = LaneDataset(
        plan=chunks,
        lanes=chunking.lanes,
        drop_last=chunking.drop_last,
        identity=_with(identity.whole(), settings),
        **{"seed": hash_ints(common["worker_config"].seed_offset, _HOOKS), **common},
    )
    _check_length(dataset)
    return dataset


def _with(identity: Identity, settings: dict[str, Any]) -> Identity:
    return replace(identity, settings={**identity.settings, **settings})


def refuse_chunking(chunking: Chunking) -> None:
    """Refuse arguments that are about chunks where there are none.

    Raises:
        UsageError: names the first of them.
    """
    for name in ("chunk_size", "chunk_remainder", "lanes"):
        if getattr(chunking, name) is not None:
            raise UsageError(
                f"{name}={getattr(chunking, name)!r} has no effect: the batches of this task encoder are planned, "
                "without chunks, and go on on any number of ranks",
                fix=f"leave out {name}",
            )


def _check_length(dataset: SavableDataset) -> None:
    """Refuse passes in which some rank would not get a single sample."""
    samples, world = _samples(dataset), dataset.worker_config.world_size
    if samples is not None and samples < world:
        raise EmptyDatasetError(
            f"{samples} samples for {world} data-parallel ranks: not all of them would get one",
            where=_names(dataset),
            fix=f"use at most {samples} data-parallel ranks, more data, or repeat=True",
        )


def _samples(dataset: SavableDataset) -> int | None:
    """Samples of a pass; None: it does not end."""
    bounds = dataset.plan.order.bounds(0)
    return None if bounds is None else bounds[1] - bounds[0]


def _names(dataset: SavableDataset) -> str:
    return ", ".join(leaf.name for leaf in dataset.leaves[:3]) + (" and others" if len(dataset.leaves) > 3 else "")
