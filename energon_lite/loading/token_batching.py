"""From a user's settings for batches by tokens to a plan."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from energon_lite.batching.capacity import Ints, checked_lengths
from energon_lite.batching.steps import IMAGES, STEP_VERSION, TOKENS, CostColumns, Lengths, StepCostModel
from energon_lite.batching.strategy import (
    CHUNK,
    PLAN_VERSION,
    STRATEGIES,
    Strategy,
    packing_capacity,
    read_strategy,
    strategy_from_dict,
    to_dict,
)
from energon_lite.batching.token_plan import TokenPlan
from energon_lite.documents import load_yaml
from energon_lite.documents.node import Node
from energon_lite.entry_points import cost_models, load
from energon_lite.errors import DataIndexError, TopologyError, UsageError, at_least_one, listed
from energon_lite.hooks import TaskEncoder, hooks_of
from energon_lite.loading.iterators.dataset import Identity
from energon_lite.loading.makers.chunk_bundles import DEFAULT_CHUNK
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.options import ByTokens
from energon_lite.order.hashing import HashDomain, hash_ints
from energon_lite.order.orders import Order
from energon_lite.worker_config import WorkerConfig

#: Target number of epochs that are planned together; there may be up to about twice as many.
_EPOCHS = 64
#: Smallest number of positions that are planned together.
_SMALLEST = 1024
#: Tag that separates the hashes of this purpose from those of others.
_PLANS = HashDomain.PLANS.value
#: Alternative to a missing column of lengths, for messages.
_ENCODED = "give length_column=None, so that lengths are taken from encoded samples"
#: Cost model of documents that name none.
_DEFAULT_MODEL = "transformer"
#: Remedy for a missing cost model, for messages.
_NO_EXTRA = "costs and max_images need energon_lite/extras/balance, which is not there; restore it, or leave them out"
#: Alternative to a missing column of costs, for messages.
_NO_COSTS = "leave out costs and max_images, or use a cost model without them"


@dataclass(frozen=True)
class TokenBatching(ByTokens):
    """Checked settings for batches by tokens, and the positions that are planned together; None: the default."""

    strategy: Strategy
    costs: StepCostModel | None = None
    plan_chunk: int | None = None

    def settings(self) -> dict[str, Any]:
        """Return the settings that decide batches, independent of the source of lengths."""
        return {"batching": to_dict(self.strategy), "plan_version": PLAN_VERSION}


def token_batching(
    batching: ByTokens, plan_chunk: int | None, batch_size: int | None, packing: int | None
) -> TokenBatching:
    """Check the user's settings and return them.

    Raises:
        ConfigError: a mistake in the document of the strategy.
        UsageError: arguments that do not go together.
    """
    length_column = batching.length_column
    length_field = batching.length_field
    step = batching.micro_batches_per_step
    if step is not None and length_column is None:
        raise UsageError(
            f"micro_batches_per_step={step} needs a column of lengths: steps are planned before samples are encoded",
            fix="measure the data set, and give length_column; or leave out micro_batches_per_step",
        )
    if length_field is not None and length_column is not None:
        raise UsageError(
            f"length_field={length_field!r} is about encoded samples, but lengths come from column {length_column!r}",
            fix="give length_column=None to take the lengths from encoded samples",
        )
    _check_costs(batching)
    for name, value in (("batch_size", batch_size), ("packing_buffer_size", packing)):
        if value is not None:
            raise UsageError(
                f"{name}={value} together with batching: the strategy decides what makes up a batch",
                fix=f"give {name}=None",
            )
    strategy = batching.strategy
    if isinstance(strategy, str) and strategy in STRATEGIES:
        fix = f'give {{"strategy": "{strategy}"}} with its settings, or a YAML file'
        raise UsageError(f"batching={strategy!r} is the name of a strategy, not a file", fix=fix)
    if isinstance(strategy, (str, os.PathLike)):
        strategy = read_strategy(load_yaml(strategy))
    elif isinstance(strategy, Mapping):
        strategy = strategy_from_dict(strategy)
    elif not isinstance(strategy, tuple(STRATEGIES.values())):
        raise UsageError(
            f"batching is a {type(strategy).__name__}",
            fix="give a strategy, its document as a dict, or a YAML file; or register_strategy, if it is your own",
        )
    if plan_chunk is None and length_column is None:
        plan_chunk = DEFAULT_CHUNK
    if batching.max_images is not None and packing_capacity(strategy) is None:
        raise UsageError(
            f"max_images={batching.max_images} is a limit of packed micro-batches, and these are padded",
            fix="leave out max_images, or give a strategy whose capacity counts packed_tokens",
        )
    costs = batching.costs
    if isinstance(costs, (str, os.PathLike)):
        costs = _cost_model(load_yaml(costs))
    return TokenBatching(**vars(batching) | {"strategy": strategy, "costs": costs}, plan_chunk=plan_chunk)


def _check_costs(batching: ByTokens) -> None:
    """Refuse costs and limits of images without the settings that they need."""
    at_least_one(max_images=batching.max_images)
    for name, needed, fix in (
        ("costs", "micro_batches_per_step", "say how many micro-batches a step has: those of a step are balanced"),
        ("costs", "length_column", "measure the data set, and give length_column"),
        ("max_images", "length_column", "measure the data set, and give length_column"),
    ):
        if getattr(batching, name) is not None and getattr(batching, needed) is None:
            raise UsageError(f"{name} without {needed}", fix=f"{fix}; or leave out {name}")


def _cost_model(document: Node | None) -> StepCostModel:
    """Return the cost model of a document, made by the guest that its key ``model`` names.

    Args:
        document: the document; None: a model in which nothing costs anything, for a limit of images alone.

    Raises:
        ConfigError: there is no such guest, or a mistake in the document.
        UsageError: the same, without a document.
    """
    named = None if document is None else document.entries().get("model")
    name = _DEFAULT_MODEL if named is None else named.string()
    models = cost_models()
    if name in models:
        return load(models[name])(document)
    what = f"there is no cost model {name!r}"
    where = document if named is None else named
    fix = _NO_EXTRA if name == _DEFAULT_MODEL else f"the models are: {listed(sorted(models), 20)}"
    raise UsageError(what, fix=fix) if where is None else where.error(what, fix)


def plan_by_tokens(
    order: Order,
    identity: Identity,
    batching: TokenBatching,
    *,
    leaves: Sequence[Leaf],
    encoder: TaskEncoder,
    config: WorkerConfig,
) -> tuple[TokenPlan, Identity]:
    """Return the plan of batches by tokens, by a column of lengths, and the identity including the plan's settings.

    Raises:
        UsageError: the hooks decide how many samples there are, or there are no lengths.
        TopologyError: the micro-batches of a step cannot be shared evenly by the ranks.
    """
    if hooks_of(encoder, packing=False, batched=True).content_decides:
        raise UsageError(
            "batches cannot be planned by tokens where hooks decide how many samples there are",
            fix="give length_column=None to have batches made of the samples that come out",
        )
    assert batching.length_column is not None  # plans need a column
    lengths = [_column(leaf, batching.length_column) for leaf in leaves]
    key = getattr(batching.strategy, "key", None)
    world = config.world_size
    step = batching.micro_batches_per_step
    key_lengths = None if key is None else [_column(leaf, key) for leaf in leaves]
    if step is not None and step % world:
        raise TopologyError(
            f"{step} micro-batches of a step cannot be shared evenly by {world} data-parallel ranks",
            fix=f"give micro_batches_per_step={-(-step // world) * world}, or another number of ranks",
        )
    chunk = _default_chunk(leaves) if batching.plan_chunk is None else batching.plan_chunk
    shorter: Mapping[str, int] = getattr(encoder, "row_shorter_by", {})
    less = [shorter.get(getattr(column, "maker", {}).get("length", ""), 0) for column in lengths]
    of_rows = [_OfRows(column, by) if by else column for column, by in zip(lengths, less, strict=True)]
    seed = hash_ints(config.seed_offset, _PLANS)
    costs = _cost_columns(batching, leaves)
    plan = TokenPlan(order, batching.strategy, of_rows, key_lengths, seed=seed, chunk=chunk, step=step, costs=costs)
    settings = {
        **identity.settings,
        **batching.settings(),
        "length_column": batching.length_column,
        "plan_chunk": chunk,
        **({} if step is None else {"micro_batches_per_step": step}),
        **({} if batching.costs is None else {"costs": batching.costs.by_feature()}),
        **({} if batching.max_images is None else {"max_images": batching.max_images}),
        **({} if step is None and batching.max_images is None else {"step_version": STEP_VERSION}),
    }
    columns: list[tuple[Lengths, ...]] = [(column,) for column in lengths]
    if key_lengths is not None:
        columns = [(*own, column) for own, column in zip(columns, key_lengths, strict=True)]
    if costs is not None:
        columns = [(*own, *more.values()) for own, more in zip(columns, costs.leaves, strict=True)]
    identified = [
        replace(leaf, settings=(*leaf.settings, *map(_fingerprint, own), *([by] if by else [])))
        for leaf, own, by in zip(identity.leaves, columns, less, strict=True)
    ]
    return plan, replace(identity, settings=settings, leaves=tuple(identified))


def _cost_columns(batching: TokenBatching, leaves: Sequence[Leaf]) -> CostColumns | None:
    """Return the cost model with its columns; None: neither costs nor images are balanced or limited."""
    most = batching.max_images
    if batching.costs is None and most is None:
        return None
    model = _cost_model(None) if batching.costs is None else batching.costs
    names = {*model.needs} - {TOKENS} | ({IMAGES} if most is not None else set())
    columns = [{name: _column(leaf, name, _NO_COSTS) for name in sorted(names)} for leaf in leaves]
    return CostColumns(model, columns, most)


@dataclass(frozen=True)
class _OfRows:
    """Lengths of rows, which have ``less`` positions fewer than their samples have tokens."""

    lengths: Lengths
    less: int

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, key: Any) -> Ints:
        return np.maximum(checked_lengths(self.lengths[key]) - self.less, 0)


def _default_chunk(leaves: Sequence[Leaf]) -> int:
    """Return the number of positions that are planned together: :data:`_EPOCHS` epochs of a small data set, rounded up
    to a power of two. Each epoch is planned by itself, so more epochs would only take longer."""
    samples = sum(len(leaf.source) for leaf in leaves)
    return min(CHUNK, max(_SMALLEST, 1 << (_EPOCHS * samples - 1).bit_length()))


def _column(leaf: Leaf, name: str, instead: str = _ENCODED) -> Lengths:
    try:
        column: Lengths = leaf.source.column(name)
    except DataIndexError as error:
        raise UsageError(
            f"batches by tokens need numbers of all samples: {error.what}",
            where=error.where or leaf.name,
            fix=f"{instead}; or {error.fix or 'name another column by length_column, or measure the data set'}",
        ) from None
    return column


def _fingerprint(column: Lengths) -> str:
    """Return a digest of the values of a column; a column on disk has stored its own."""
    known = getattr(column, "fingerprint", None)
    if known is not None:
        return str(known() if callable(known) else known)
    values: Ints = checked_lengths(column[np.arange(len(column))])
    return hashlib.sha256(np.ascontiguousarray(values, dtype="<i8").tobytes()).hexdigest()[:16]
