"""Data sets made of other data sets: limited, repeated, mixed, mapped. Each is a plan over the inner items.

Here is their base class, and its conversion to a data set that a loader can run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from energon_lite.batching.plan import FixedPlan
from energon_lite.errors import EmptyDatasetError, UnknownLengthError, UsageError
from energon_lite.extras.energon.wrappers.items_dataset import Branch, ItemFunction, ItemsDataset
from energon_lite.extras.energon.wrappers.loops import Loop, Loops, is_endless, length_of, loops_of
from energon_lite.extras.energon.wrappers.streams import ItemStream, PassStream, PlanStream
from energon_lite.loading.iterators.dataset import Identity, SavableDataset
from energon_lite.loading.iterators.lane_dataset import LaneDataset
from energon_lite.loading.iterators.planned_dataset import PlannedDataset
from energon_lite.order.hashing import HashDomain, hash_ints
from energon_lite.worker_config import WorkerConfig

#: Tag that separates the hashes of this purpose from those of others.
_WRAPPED = HashDomain.WRAPPED.value
#: Most inner data sets whose settings are in the state in clear text; of more, their fingerprints are.
_IN_CLEAR = 2


@dataclass(frozen=True)
class Parts:
    """Items of wrapped data sets: their stream, and the data sets that make them.

    Args:
        stream: the items, in their order.
        branches: the innermost data sets.
        depends_on_ranks: the stream depends on the number of ranks.
    """

    stream: ItemStream
    branches: tuple[Branch, ...]
    depends_on_ranks: bool = False


class WrapperDataset(SavableDataset):
    """A data set made of others; a loader treats it like any other. Its state is that of a plan: a few integers.

    An *item* is what the inner data sets return to a rank in one step: a micro-batch, or a sample if nothing is
    batched. The items of all ranks together are one sequence, which is dealt to the ranks in turn.

    Args:
        datasets: the inner data sets.
        worker_config: the same as theirs; may be left out.
        text: further arguments, in the description of this data set.
        own: attributes of the wrapper.

    Raises:
        UsageError: it differs from theirs, or an argument is not a data set.
    """

    def __init__(
        self,
        datasets: SavableDataset | Iterable[SavableDataset],
        *,
        worker_config: WorkerConfig | None = None,
        text: str = "",
        **own: Any,
    ):
        given = (datasets,) if isinstance(datasets, SavableDataset) else tuple(datasets)
        name = type(self).__name__
        for inner in given:
            if not isinstance(inner, SavableDataset):
                raise UsageError(
                    f"{name} of a {type(inner).__name__}", fix="give what get_train_dataset or get_val_dataset returned"
                )
        if not given:
            raise UsageError(f"{name} of no data set", fix="give at least one")
        for inner in given:
            if inner.worker_config != (worker_config or given[0].worker_config):
                raise UsageError(f"{name} has another worker_config than a data set in it", fix="give both the same")
        read = {field.name for field in fields(SavableDataset)} - {"plan", "leaves", "identity"}  # by loaders, callers
        attributes = {name: getattr(given[0], name) for name in read}
        vars(self).update(attributes, datasets=given, _text=text, **own)  # the base is frozen

    @property
    def dataset(self) -> SavableDataset:
        """The only inner data set."""
        if len(self.datasets) != 1:
            raise UsageError(f"{type(self).__name__} has {len(self.datasets)} data sets", fix="use .datasets")
        return self.datasets[0]

    datasets: tuple[SavableDataset, ...]
    _text: str

    def parts(self) -> Parts:
        """Return the items of this data set, for a wrapper around it; here those of the inner one."""
        return parts_of(self.dataset, type(self).__name__)

    @cached_property
    def resolved(self) -> SavableDataset:
        """The data set that a loader runs."""
        return self.planned(self.parts())

    @property
    def leaves(self) -> Any:
        return self.resolved.leaves

    @property
    def plan(self) -> Any:
        return self.resolved.plan

    @property
    def identity(self) -> Identity:
        return self.resolved.identity

    def planned(
        self,
        parts: Parts,
        *,
        batch_size: int | None = None,
        batcher: ItemFunction | None = None,
        drop_last: bool = False,
        **more: Any,
    ) -> ItemsDataset:
        """Return a planned data set of items.

        Args:
            batch_size, batcher, drop_last: put ``batch_size`` items together to one.
            more: other fields of the data set.

        Raises:
            EmptyDatasetError: there are no items.
        """
        branches = parts.branches
        if parts.stream.per_pass == 0:
            raise EmptyDatasetError(f"{self} has no items", fix="wrap a data set that has samples")
        inside = [branch.dataset for branch in branches]
        first = inside[0]
        settings: dict[str, Any] = {"kind": "wrapped", "wrappers": str(self)}
        for number, dataset in enumerate(inside):
            clear = len(inside) <= _IN_CLEAR
            settings[f"data set {number}"] = dict(dataset.identity.settings) if clear else dataset.identity.fingerprint
        if len(str(settings)) > 1500:
            digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:16]
            settings = {"kind": "wrapped", "wrappers": digest}  # they are too long for a state
        if parts.depends_on_ranks:
            settings["ranks"] = self.worker_config.world_size
        return ItemsDataset(
            plan=FixedPlan(parts.stream, batch_size, drop_last=drop_last),
            branches=branches,
            batcher=batcher,
            title=str(self),
            leaves=tuple(leaf for dataset in inside for leaf in dataset.leaves),
            weights=None,
            task_encoder=first.task_encoder,
            worker_config=self.worker_config,
            identity=Identity(settings, tuple(leaf for dataset in inside for leaf in dataset.identity.leaves)),
            seed=hash_ints(first.seed, _WRAPPED),
            batched=batch_size is not None,
            **more,
        )

    # -- as a data set ------------------------------------------------------------------------------------------------

    def runner(self) -> Any:
        return self.resolved.runner()

    def state(self, cursor: Any) -> Any:
        return self.resolved.state(cursor)

    def restore_sample(self, key: Any, runner: Any) -> Any:
        return self.resolved.restore_sample(key, runner)

    @cached_property
    def is_endless(self) -> bool:
        return is_endless(loops_of(self.resolved), self.resolved.is_endless)

    def __len__(self) -> int:
        inner = self.resolved

        def inside(loops: int) -> int | None:
            if inner.is_endless and not inner.loop_length:
                return None
            if isinstance(inner, PlannedDataset):
                return sum(map(inner.loop_steps, range(loops)))
            return loops * len(inner)

        if inner.loops is None:
            return len(inner)
        if (length := length_of(loops_of(inner), inside)) is None:
            raise UnknownLengthError("it never ends", fix="wrap it in LimitDataset or EpochizeDataset")
        return length

    def __str__(self) -> str:
        inside = ", ".join(str(one) if isinstance(one, WrapperDataset) else type(one).__name__ for one in self.datasets)
        return f"{type(self).__name__}({inside}{self._text})"

    # frozen dataclasses compare and hash by identity here, as their base does
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def parts_of(dataset: SavableDataset, wrapper: str) -> Parts:
    """Return the items of a data set.

    Args:
        wrapper: name of the wrapper, for messages.

    Raises:
        UsageError: the number of items is not known.
    """
    if is_by_content(dataset):
        raise UsageError(
            f"{wrapper} of a data set whose hooks or tokens decide how many batches there are: none of them has a "
            "number",
            fix="RepeatDataset, LimitDataset and EpochizeDataset take it; do the rest in the task encoder, or blend in "
            "a metadataset",
        )
    if isinstance(dataset, WrapperDataset):
        return dataset.parts()
    assert isinstance(dataset, PlannedDataset)
    world = dataset.worker_config.world_size
    count = dataset.plan.count(0)
    loop = dataset.loop_length
    if count is not None:
        if dataset.plan.count(1) != count:
            raise UsageError(
                f"{wrapper} of a data set whose passes differ in length ({count}, then {dataset.plan.count(1)})",
                fix="give whole repetitions in the blend_epochized, or repeat=True",
            )
        if dataset.drop_last:
            count -= count % world
        if dataset.limit is not None:
            count = min(count, dataset.limit * world)
    depends = bool(loop) or dataset.limit is not None or (dataset.drop_last and count is not None)
    stream: ItemStream = PlanStream(count)
    if loop:
        stream = PassStream(stream, loop * world, loop * world)
    return Parts(stream, (Branch(dataset),), depends_on_ranks=depends)


def is_by_content(dataset: SavableDataset) -> bool:
    """Return whether the items of a data set have no numbers."""
    inner = dataset.resolved
    return isinstance(inner, LaneDataset) or (isinstance(inner, PlannedDataset) and inner.plan.rows is None)


def looped(wrapper: WrapperDataset, loop: Loop) -> SavableDataset:
    """Return a data set with batches by hooks or tokens, with another loop around its own."""
    inner = wrapper.dataset.resolved
    before = loops_of(inner)
    loops = (*before, loop)
    settings = dict(inner.identity.settings)
    settings["loops"] = [[inner_loop.kind, inner_loop.count] for inner_loop in loops]
    counts_inside = any(inner_loop.by_steps for inner_loop in before) or inner.limit or inner.loop_length
    counts_inside = counts_inside or (inner.drop_last and not inner.is_endless)
    if counts_inside:
        settings["ranks"] = wrapper.worker_config.world_size
    return replace(inner, loops=Loops(loops), identity=replace(inner.identity, settings=settings))
