"""Assembly of a data set from an order, leaves and hooks: planned batches, or chunks if batches are content-decided."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from energon_lite.batching.chunks import ChunkPlan, default_chunk_size
from energon_lite.batching.pack_filling import PACK_VERSION
from energon_lite.batching.plan import FixedPlan
from energon_lite.errors import EmptyDatasetError, UsageError, check_choice
from energon_lite.hooks import hooks_of, is_overridden
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.identity import Identity
from energon_lite.loading.iterators.lane_cursor import MAX_LANES, check_topology
from energon_lite.loading.iterators.lane_dataset import PUSHBACK, LaneDataset
from energon_lite.loading.iterators.planned_dataset import Cursor, PlannedDataset
from energon_lite.loading.makers.pack_selection import pack_selection
from energon_lite.loading.makers.token_chunks import TokenBundling
from energon_lite.loading.token_batching import TokenBatching, plan_by_tokens
from energon_lite.order.hashing import hash_ints
from energon_lite.order.orders import Order

__all__ = ["Chunking", "assembled"]

#: Tag that separates the hashes of this purpose from those of others.
_HOOKS = 23


@dataclass(frozen=True)
class Chunking:
    """The user's arguments for packing and chunks; see the arguments of the same names of ``get_train_dataset``."""

    packing_buffer_size: int | None = None
    chunk_size: int | None = None
    chunk_remainder: str | None = None
    lanes: int | None = None
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.chunk_remainder is not None:
            check_choice("chunk_remainder", self.chunk_remainder, ("carry", "keep", "drop"))
        if self.lanes is not None and not 1 <= self.lanes <= MAX_LANES:
            raise UsageError(
                f"lanes is {self.lanes}",
                fix=f"give a multiple of the number of data-parallel ranks, at most {MAX_LANES}",
            )

    @property
    def keeps(self) -> bool:
        """True if samples that do not fill a batch at the end of a chunk, or of the pass, are kept."""
        return self.chunk_remainder == "keep" or (self.chunk_remainder != "drop" and not self.drop_last)


def assembled(
    order: Order,
    identity: Identity,
    chunking: Chunking,
    tokens: TokenBatching | None,
    *,
    batch_size: int | None,
    refill: bool,
    **common: Any,
) -> SavableDataset:
    """Return a data set.

    Args:
        tokens: settings of batches by tokens; None: batches of ``batch_size`` samples.
        refill: replace samples that fail, if batches of a fixed size are planned.
        common: fields of :class:`~energon_lite.loading.iterators.dataset.SavableDataset`.

    Raises:
        UsageError: arguments that contradict each other, or missing lengths.
        TopologyError: lanes, or the micro-batches of a step, cannot be divided among the ranks.
        EmptyDatasetError: a pass has too few samples.
    """
    encoder = common["task_encoder"]
    config = common["worker_config"]
    common |= {"seed": hash_ints(config.seed_offset, _HOOKS), "drop_last": chunking.drop_last}
    if tokens is not None and tokens.length_column is None:
        return _by_encoded_tokens(order, identity, chunking, tokens, **common)
    packing = chunking.packing_buffer_size is not None
    hooks = hooks_of(encoder, packing=packing, batched=tokens is not None or batch_size is not None)
    if tokens is None and hooks.content_decides:
        return _by_content(order, identity, chunking, batch_size, groups=hooks.groups, **common)
    for name in ("chunk_size", "chunk_remainder", "lanes"):
        if getattr(chunking, name) is not None:
            raise UsageError(
                f"{name}={getattr(chunking, name)!r} has no effect: the batches of this task encoder are planned, "
                "without chunks, and go on on any number of ranks",
                fix=f"leave out {name}",
            )
    if tokens is not None:
        token_plan, identity = plan_by_tokens(
            order, identity, tokens, leaves=common["leaves"], encoder=encoder, config=config
        )
        return PlannedDataset(plan=token_plan, identity=identity, **common)
    plan = FixedPlan(order, batch_size, drop_last=chunking.drop_last)
    dataset = PlannedDataset(plan=plan, identity=identity, batched=batch_size is not None, refill=refill, **common)
    _check_length(dataset)
    if dataset.step(Cursor(plan.start)) is None:
        raise EmptyDatasetError(
            f"{_samples(dataset)} samples do not fill one batch of {batch_size} on each of {config.world_size} ranks, "
            "and batch_drop_last leaves out the rest",
            where=_names(dataset),
            fix="use smaller batches, fewer ranks, or batch_drop_last=False",
        )
    return dataset


def _by_content(
    order: Order, identity: Identity, chunking: Chunking, batch_size: int | None, *, groups: bool, **common: Any
) -> LaneDataset:
    """Return a data set whose hooks decide how many samples there are."""
    # With groups, the samples of a rare group would be handed over from chunk to chunk without end.
    carries = chunking.chunk_remainder in (None, "carry") and batch_size is not None and not groups
    if chunking.chunk_remainder == "carry" and not carries:
        raise UsageError(
            'chunk_remainder="carry" needs batches of batch_size samples, without batch_group_criterion',
            fix='give "keep" or "drop"',
        )
    buffer = chunking.packing_buffer_size
    size = chunking.chunk_size
    selection = None if buffer is None else pack_selection(common["task_encoder"])
    if size is None:
        size = default_chunk_size(batch_size, buffer, endless=order.bounds(0) is None, carries=carries)
    pushback = buffer is not None and chunking.chunk_remainder in (None, "carry") and not groups
    plan = ChunkPlan(order, batch_size, size, buffer, keep_remainder=chunking.keeps, carries=carries, pushback=pushback)
    settings = {
        "packing_buffer_size": buffer,
        "chunk_size": size,
        "chunk_remainder": "carry" if carries else "keep" if plan.keep_remainder else "drop",
        "groups": groups,
        **({PUSHBACK: "carry"} if pushback else {}),
        **({} if selection is None else {"pack_capacity": selection.capacity, "pack_version": PACK_VERSION}),
    }
    return _in_lanes(plan, identity, settings, chunking, **common)


def _by_encoded_tokens(
    order: Order, identity: Identity, chunking: Chunking, tokens: TokenBatching, **common: Any
) -> LaneDataset:
    """Return a data set with batches by tokens whose lengths are known after samples are encoded."""
    if chunking.chunk_remainder is not None:
        raise UsageError(
            f"chunk_remainder={chunking.chunk_remainder!r} has no effect with batching", fix="leave out chunk_remainder"
        )
    encoder = common["task_encoder"]
    if is_overridden(encoder, "batch_group_criterion"):
        raise UsageError(
            f"{type(encoder).__name__}.batch_group_criterion together with batching: both decide what makes up a batch",
            fix="leave out one of them",
        )
    assert tokens.plan_chunk is not None  # it has a default if there is no column
    settings = {**tokens.settings(), "length_field": tokens.length_field, "plan_chunk": tokens.plan_chunk}
    bundling = TokenBundling(tokens.strategy, tokens.length_field)
    plan = ChunkPlan(order, None, tokens.plan_chunk)
    return _in_lanes(plan, identity, settings, chunking, bundling=bundling, **common)


def _in_lanes(
    plan: ChunkPlan, identity: Identity, settings: dict[str, Any], chunking: Chunking, **common: Any
) -> LaneDataset:
    """Return a data set that is worked on in chunks; ``settings`` decide the batches of a chunk."""
    if chunking.lanes is not None:
        check_topology(chunking.lanes, common["worker_config"].world_size)
    # No rank knows the progress of other ranks' lanes, so it does not know which stages have begun: all stages count.
    identity = identity.whole()
    identity = replace(identity, settings={**identity.settings, **settings})
    dataset = LaneDataset(plan=plan, lanes=chunking.lanes, identity=identity, **common)
    _check_length(dataset)
    return dataset


def _check_length(dataset: SavableDataset) -> None:
    """Refuse passes in which some rank would get no sample."""
    samples = _samples(dataset)
    world = dataset.worker_config.world_size
    if samples is not None and samples < world and not dataset.once:
        raise EmptyDatasetError(
            f"{samples} samples for {world} data-parallel ranks: not all of them would get one",
            where=_names(dataset),
            fix=f"use at most {samples} data-parallel ranks, more data, or repeat=True",
        )


def _samples(dataset: SavableDataset) -> int | None:
    """Return the number of samples in a pass; None: the pass does not end."""
    bounds = dataset.plan.order.bounds(0)
    return None if bounds is None else bounds[1] - bounds[0]


def _names(dataset: SavableDataset) -> str:
    return ", ".join(leaf.name for leaf in dataset.leaves[:3]) + (" and others" if len(dataset.leaves) > 3 else "")
