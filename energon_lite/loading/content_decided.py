"""Assembly of data sets with content-decided batches: from the user's arguments for chunks to lanes of chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from energon_lite.batching.best_fit_decreasing import PACK_VERSION
from energon_lite.batching.plan import ChunkPlan, default_chunk_size
from energon_lite.errors import UsageError
from energon_lite.hooks import is_overridden
from energon_lite.loading.iterators.dataset import Identity
from energon_lite.loading.iterators.lane_cursor import check_topology
from energon_lite.loading.iterators.lane_dataset import LaneDataset
from energon_lite.loading.makers.chunk_bundles import BundlesByTokens
from energon_lite.loading.makers.sample_length import pack_selection
from energon_lite.loading.options import Chunks
from energon_lite.loading.token_batching import TokenBatching
from energon_lite.order.orders import Order


def by_content(
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


def by_encoded_tokens(
    order: Order, identity: Identity, chunks: Chunks, tokens: TokenBatching, **common: Any
) -> LaneDataset:
    """Return a data set with batches by tokens whose lengths are known after samples are encoded."""
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
    if chunks.lanes is not None:
        check_topology(chunks.lanes, common["worker_config"].world_size)
    # No rank knows the progress of other ranks' lanes, so it does not know which stages have begun: all stages count.
    identity = identity.whole()
    identity = replace(identity, settings={**identity.settings, **settings})
    return LaneDataset(plan=plan, lanes=chunks.lanes, identity=identity, **common)
