"""Random pipelines: a source, hooks, a way to batch, and wrappers around all that; the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from energon_lite import ByTokens, Chunks, SavableDataset, WorkerConfig, get_train_dataset, get_val_dataset
from energon_lite.extras.balance.cost_model import CostModel
from energon_lite.extras.energon import GroupBatchDataset, PackingDataset
from energon_lite.loading.iterators.lane_dataset import LaneDataset
from tests.core.laws.naive_hooks import Hooks, encoder_of
from tests.core.laws.naive_items import Item, Reference, names_in
from tests.core.laws.naive_lanes import LaneRun, NoBatches
from tests.core.laws.naive_wrappers import (
    Batched,
    Concat,
    Epochize,
    Filtered,
    Limit,
    Mapped,
    Mixed,
    MixedBatches,
    Node,
    Repeat,
    Window,
)
from tests.core.laws.sources import Source, random_source
from tests.core.laws.token_data import DOCUMENTS
from tests.testing import ALONE

#: How batches are made: of a number of samples (with hooks, or with none at all), by measured tokens, by the tokens of
#: encoded samples, as hooks decide, or as a wrapper around single samples decides.
KINDS = ("fixed", "fixed", "fixed", "default", "tokens", "encoded", "hooks", "hooks", "grouped", "packed")
#: Those whose items have numbers.
NUMBERED = ("fixed", "default")
MODEL = CostModel.from_features({"tokens": 10**9, "squared_patches": 10**9, "images": 5 * 10**9, "loss_tokens": 10**9})
_COST: dict[str, Any] = {"strategy": "best_fit", "capacity": 4000, "unit": "cost", "alpha": 50, "oversize": "own_batch"}
STRATEGIES = (DOCUMENTS[0], _COST, *DOCUMENTS[1:])


class Wrong(AssertionError):
    """One rank without workers gets something else than plain loops say."""


@dataclass(frozen=True, eq=False, repr=False)
class Base(Node):
    """A data set at the bottom.

    Args:
        arguments: of ``get_train_dataset`` or ``get_val_dataset``.
        wrapper: what it is wrapped in by all means, "grouped" or "packed"; then it has single samples.
    """

    source: Source
    hooks: Hooks
    train: bool
    arguments: dict[str, Any]
    wrapper: str | None = None
    references: list[Reference] = field(default_factory=list)
    inner = ()

    def __repr__(self) -> str:
        hooks = {name: value for name, value in vars(self.hooks).items() if value not in (0, None, False)}
        return f"{'train' if self.train else 'val'}({self.source.what}, {hooks}, {self.arguments}, {self.wrapper})"

    @property
    def bases(self) -> list[Base]:
        return [self]

    @property
    def limit(self) -> int | None:
        return self.arguments.get("limit")

    @property
    def loop(self) -> int:
        return int(self.arguments.get("virtual_epoch_length", 0))

    @property
    def drop_last(self) -> bool:
        return bool(self.arguments.get("batch_drop_last"))

    @property
    def endless(self) -> bool:  # type: ignore[override]
        return self.train and self.arguments.get("repeat", True) and not self.loop

    @property
    def by_rank(self) -> bool:  # type: ignore[override]
        return bool(self.loop or self.limit or (self.drop_last and not self.endless))

    @cached_property
    def refills(self) -> bool:
        return self.train and not self.decides

    @property
    def decides(self) -> bool:
        """Content decides how many items there are."""
        return self.hooks.decide or self.wrapper is not None or "batching" in self.arguments

    @property
    def in_steps(self) -> bool:
        """Only the items that the ranks of a step get together are promised."""
        batching = self.arguments.get("batching")
        return batching is not None and batching.micro_batches_per_step is not None

    def build(self, config: WorkerConfig, **other: Any) -> SavableDataset:
        get = get_train_dataset if self.train else get_val_dataset
        single = replace(self.hooks, batch_size=None, groups=0, packing=None) if self.wrapper else self.hooks
        arguments = {"batch_size": single.batch_size, **self.arguments, **other}
        made = get(
            self.source.document, worker_config=config, task_encoder=encoder_of(single), trust_code=True, **arguments
        )
        encoder: Any = encoder_of(self.hooks)
        if self.wrapper == "grouped":
            return GroupBatchDataset(made, self.hooks.batch_size, encoder.batch_group_criterion, encoder.batch)
        if self.wrapper == "packed":
            select, pack = encoder.select_samples_to_pack, encoder.pack_selected_samples
            return PackingDataset(made, self.hooks.packing, select, pack)
        return made

    @property
    def reference(self) -> Reference:
        """The items that one rank without workers gets, without limits."""
        if not self.references:
            other = {"virtual_epoch_length": 0} if self.train else {"limit": None}
            dataset = self.build(ALONE, **other)
            self.references.append(Reference(dataset, refills=self.refills, name=id(self)))
        return self.references[0]

    def items(self, number: int, world: int) -> Iterator[Item]:
        if self.loop:
            size = self.loop * world
            return islice(self._pass(0), number * size, (number + 1) * size)
        items = self._pass(number)
        if self.drop_last and not self.endless:
            whole = list(items)
            items = iter(whole[: len(whole) - len(whole) % world])
        return items if self.limit is None else islice(items, self.limit * world)

    def _pass(self, number: int) -> Iterator[Item]:
        tape, place = self.reference.tape(number), 0
        while tape.reaches(place):
            if (item := tape.made[place]) is not None:
                yield item
            place += 1

    # -- what plain loops say of the reference ------------------------------------------------------------------------

    def check(self) -> None:
        """Compare what was asked of the reference with what plain loops say, where they know.

        Raises:
            Wrong: they say something else.
        """
        if not self.references or not self.references[0].passes:
            return
        reference = self.references[0]
        dataset: Any = reference.dataset.resolved
        made = reference.passes[0].made
        if isinstance(dataset, LaneDataset) and not self.hooks.tokens:
            self._check_lanes(dataset, made)
        elif not self.decides and not self.train:
            for tape in reference.passes:
                found = [None if one is None else one.content for one in tape.made]
                _same("validation", [names_in(one) for one in found], self._in_order()[: len(found)])
        elif not self.decides and not self.hooks.losses:
            self._check_epochs([one for tape in reference.passes for one in tape.made if one is not None])

    def _check_lanes(self, dataset: LaneDataset, made: list[Item | None]) -> None:
        run = LaneRun(dataset, self.hooks, dataset.lanes or 24)
        try:
            for place, item in enumerate(made):
                expected = run.at(place)
                names = None if expected is None else expected.names
                _same(f"position {place}", None if item is None else names_in(item.content), names)
                if item is not None and expected is not None:
                    _same(f"counts at {place}", +item.counts, +expected.counts)
        except NoBatches:
            return

    def _in_order(self) -> list[list[str]]:
        """The names in each micro-batch of a pass over validation data."""
        names, size = [name for leaf in self.source.leaves for name in leaf], self.hooks.batch_size
        losses = replace(self.hooks, losses=0) if self.hooks.default else self.hooks
        batches = [names[at : at + (size or 1)] for at in range(0, len(names), size or 1)]
        if self.drop_last and size is not None:
            batches = [batch for batch in batches if len(batch) == size]
        left = [[name for name in batch if not losses.fate("sample", name)] for batch in batches]
        return [[] if size is not None and losses.fate("batch", " ".join(batch)) else batch for batch in left]

    def _check_epochs(self, made: list[Item]) -> None:
        """Each sample of each data set comes once before any of them comes again."""
        tags = [name[0] for leaf in self.source.leaves for name in leaf[:1]]
        mixes = self.arguments.get("shuffle_over_epochs_multiplier", 1) not in (1, None)
        cuts = self.drop_last and not self.arguments.get("repeat", True)
        if mixes or cuts or len(set(tags)) < len(self.source.leaves):
            return
        names = [name for item in made for name in names_in(item.content)]
        for leaf in self.source.leaves:
            own = [name for name in names if name[0] == leaf[0][0]]
            for start in range(0, len(own), len(leaf)):
                epoch = own[start : start + len(leaf)]
                if len(set(epoch)) < len(epoch) or not set(epoch) <= set(leaf):
                    raise Wrong(f"an epoch of {leaf} is {epoch}")


def _same(where: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise Wrong(f"{where}: {found} instead of {expected}")


# -- at random --------------------------------------------------------------------------------------------------------


def random_node(random: Random, root: Path) -> Node:
    """A data set, in up to three wrappers."""
    depth = random.choice([0, 0, 1, 1, 2, 3])
    return _wrapped(random, root, depth, random_base(random, root))


def _wrapped(random: Random, root: Path, depth: int, node: Node) -> Node:
    for _ in range(depth):
        by_content = any(base.decides for base in node.bases)  # few wrappers take that
        kind = random.choice(_OF_CONTENT if by_content and random.random() < 0.95 else _WRAPPERS)
        inner, more = (node,), (random.choice([0.5, 1, 3]), random.choice([1, 2]))
        if kind in (Concat, Mixed, MixedBatches):
            other = random_base(random, root, NUMBERED if random.random() < 0.9 else KINDS)
            inner = random.choice([(node, other), (other, node)])
        arguments: dict[Any, Any] = {
            Limit: (random.randint(1, 9),),
            Repeat: (random.choice([None, None, 2, 3 if by_content and random.random() < 0.9 else 1.5]),),
            Epochize: (random.randint(1, 6),),
            Mapped: (random.randint(0, 9),),
            Filtered: (random.randint(0, 9),),
            Window: (random.randint(1, 6),),
            Concat: (),
            Mixed: (more,),
            Batched: (random.randint(1, 4), random.random() < 0.3),
            MixedBatches: (more, random.randint(1, 4)),
        }
        node = kind(inner, *arguments[kind])
    return node


_OF_CONTENT = (Limit, Repeat, Epochize)
_WRAPPERS = (Limit, Repeat, Epochize, Mapped, Filtered, Window, Concat, Mixed, Batched, MixedBatches)


def random_base(random: Random, root: Path, kinds: Sequence[str] = KINDS) -> Base:
    """A data set of one of these kinds, not wrapped."""
    kind, train = random.choice(kinds), random.random() < 0.5
    source = random_source(random, root, columns=kind == "tokens")
    hooks = Hooks(
        salt=random.randint(0, 9),
        losses=random.choice([0, 0, 3, 6]),
        batch_size=random.choice([None, 1, 2, 3, 5]),
        draws=random.random() < 0.5,
    )
    arguments: dict[str, Any] = {}
    if kind == "default":
        hooks = replace(hooks, default=True)
    elif kind == "tokens":
        hooks = replace(hooks, tokens=True, batch_size=None)
        step = random.choice([None, None, 12])
        costs = MODEL if step and random.random() < 0.5 else None
        arguments["batching"] = ByTokens(random.choice(STRATEGIES), micro_batches_per_step=step, costs=costs)
        arguments["chunks"] = Chunks(random.choice([11, 40, None]))
    elif kind == "encoded":
        hooks = replace(hooks, tokens=True, batch_size=None, yields=random.random() < 0.3)
        arguments["batching"] = ByTokens(random.choice(STRATEGIES), length_column=None)
        arguments["chunks"] = Chunks(random.choice([7, 20, None]), lanes=random.choice([None, 12]))
    elif kind == "hooks":
        hooks = _deciding(random, hooks)
        unit, remainder = hooks.packing or 1, random.choice([None, None, None, "keep", "drop"])
        size = random.choice([None, 1, 2, 3, 7])
        arguments["packing_buffer_size"] = hooks.packing
        arguments["chunks"] = Chunks(size and size * unit, remainder, random.choice([None, 12]))
    elif kind == "grouped":
        hooks = replace(hooks, groups=random.choice([2, 3]), batch_size=random.choice([1, 2, 3]))
    elif kind == "packed":
        hooks = replace(hooks, packing=random.choice([3, 5]), batch_size=None)
    wrapper = kind if kind in ("grouped", "packed") else None
    if random.random() < 0.2 and wrapper is None:
        arguments["batch_drop_last"] = True
    if train:
        arguments |= _order(random, source)
    if train and arguments.get("repeat", True) and random.random() < 0.15 and wrapper is None:
        arguments["virtual_epoch_length"] = random.randint(1, 6)
    if not train and random.random() < 0.2 and wrapper is None:
        arguments["limit"] = random.choice([1, 3, 7])
    return Base(source, hooks, train, arguments, wrapper)


def _deciding(random: Random, hooks: Hooks) -> Hooks:
    """Hooks that decide how many batches there are."""
    while not hooks.decide:
        batch_yields = random.random() < 0.3
        groups = 0 if hooks.batch_size is None or batch_yields else random.choice([0, 0, 2, 3])
        hooks = replace(
            hooks,
            yields=random.random() < 0.5,
            packing=random.choice([None, None, 3, 5]),
            groups=groups,
            batch_yields=batch_yields,
        )
    return hooks


def _order(random: Random, source: Source) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if random.random() < 0.3:
        arguments |= {"shuffle_buffer_size": random.choice([5, 10]), "max_samples_per_sequence": random.choice([1, 3])}
    if random.random() < 0.2:
        arguments["shuffle_over_epochs_multiplier"] = random.choice([None, 2, -1])
    if source.ends and random.random() < 0.3:
        arguments["repeat"] = False
    return arguments
