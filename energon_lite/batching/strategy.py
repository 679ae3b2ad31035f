"""Interface of all strategies, and their names in documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from energon_lite.batching.best_fit_decreasing import BestFitDecreasing
from energon_lite.batching.capacity import AttentionCost, Capacity, Ints, Unit, checked_lengths
from energon_lite.batching.micro_batches import MicroBatches, concatenate
from energon_lite.batching.packing import BestFit, ConcatSplit, Greedy
from energon_lite.batching.padded import Fixed, LengthDifference, MaxLength, SortedWindow
from energon_lite.documents import Node, from_plain, keys_of, located, read_keys
from energon_lite.errors import UsageError, at_least_one
from energon_lite.order.hashing import hash_ints

#: Samples that are planned together: enough for the same fill as with all samples, at well below a second.
CHUNK = 1 << 17
#: Version of the strategies; raised when the same lengths would give other micro-batches than before. It is written
#: into states; states with another version are refused.
PLAN_VERSION = 1


class Strategy(Protocol):
    """Rule that groups samples: a function of lengths and a seed, without state and I/O.

    Every strategy is a frozen dataclass, and every plan consists of integers only, so that all ranks, on any machine,
    compute the same one.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def plan(self, lengths: Ints, *, seed: int = 0, key_lengths: Ints | None = None) -> MicroBatches:
        """Plan micro-batches of samples ``0 .. len(lengths) - 1``, which are in stream order.

        Args:
            lengths: tokens of each sample, of all modalities together, int ``[samples]``.
            seed: for strategies that shuffle.
            key_lengths: tokens of the key field, int ``[samples]``; for strategies with a ``key``.

        Raises:
            UsageError: a sample does not fit, and the strategy treats that as an error; or an argument has a wrong
                shape.
        """


#: The strategies by their names in documents.
STRATEGIES: dict[str, type[Any]] = {
    "fixed": Fixed,
    "capacity": Greedy,
    "sorted_window": SortedWindow,
    "length_difference": LengthDifference,
    "max_length": MaxLength,
    "best_fit": BestFit,
    "bfd": BestFitDecreasing,
    "concat_split": ConcatSplit,
}
_NAMES = {cls: name for name, cls in STRATEGIES.items()}
_T = TypeVar("_T", bound=type[Any])
_UNIT_OF: dict[str, Unit] = {"capacity": "padded_tokens", "sorted_window": "padded_tokens"}


def register_strategy(name: str) -> Callable[[_T], _T]:
    """Register a strategy class under a name for documents and saved states, as a decorator.

    The annotations of its fields define the keys of its document (:mod:`energon_lite.documents.typed`).

    Args:
        name: not the name of another strategy; the same class may be registered again after a new import.

    Raises:
        UsageError: another class has the name, or this one is not a frozen dataclass with a method ``plan``.

    Example:
        >>> @register_strategy("pairs")
        ... @dataclass(frozen=True)
        ... class Pairs:
        ...     def plan(self, lengths, *, seed=0, key_lengths=None):
        ...         numbers = np.arange(len(lengths))
        ...         return MicroBatches.of([numbers[i : i + 2] for i in numbers[::2]], lengths, packed=False)
    """

    def register(cls: _T) -> _T:
        settings = getattr(cls, "__dataclass_params__", None)
        if settings is None or not settings.frozen or not callable(getattr(cls, "plan", None)):
            raise UsageError(f"{cls.__name__} is not a strategy", fix="make it a frozen dataclass with a method plan")
        other = STRATEGIES.get(name, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise UsageError(f"the strategy name {name!r} is taken: {other.__qualname__}", fix="give another name")
        STRATEGIES[name] = cls
        _NAMES[cls] = name
        return cls

    return register


def plan_in_chunks(
    strategy: Strategy, lengths: Ints, *, seed: int = 0, key_lengths: Ints | None = None, chunk: int = CHUNK
) -> MicroBatches:
    """Plan of a whole epoch: the plans of its chunks of ``chunk`` samples, concatenated.

    A chunk's plan depends only on its number, its lengths and the seed, so a run can be resumed inside it without
    planning the chunks before.

    Example:
        >>> batches = plan_in_chunks(Fixed(2), np.array([1, 1, 1, 1]), chunk=3)
        >>> [part.tolist() for part in batches]
        [[0, 1], [2], [3]]
    """
    at_least_one("give at least 1 sample", chunk=chunk)
    lengths = checked_lengths(lengths)
    firsts = range(0, max(len(lengths), 1), chunk)
    parts = [
        strategy.plan(
            lengths[first : first + chunk],
            seed=hash_ints(seed, number),
            key_lengths=None if key_lengths is None else key_lengths[first : first + chunk],
        )
        for number, first in enumerate(firsts)
    ]
    return concatenate(parts, firsts)


def strategy_from_dict(document: Mapping[str, Any], *, at: str = "batching") -> Strategy:
    """Read the strategy that a document describes.

    Args:
        document: ``strategy``, a name of :data:`STRATEGIES`, and the fields of that strategy. A capacity is written as
            ``capacity`` (an integer), together with ``unit``, ``multiple`` and, for the unit ``cost``, ``alpha``.
        at: position of the document, for messages.

    Raises:
        ConfigError: a key or a value is wrong; the message names it.

    Example:
        >>> strategy_from_dict({"strategy": "best_fit", "capacity": 12000, "open_bins": 16})
        BestFit(capacity=Capacity(limit=12000, unit='packed_tokens', ...), open_bins=16, ...)
    """
    return read_strategy(from_plain(document, "", at))


def read_strategy(node: Node) -> Strategy:
    """Read the strategy of a parsed document, so that messages have its file and lines.

    Raises:
        ConfigError: as :func:`strategy_from_dict`.
    """
    entries = node.entries()
    if "strategy" not in entries:
        raise node.error("the key 'strategy' is missing", expected="the name of one", choices=STRATEGIES)
    name = entries["strategy"].value
    if not isinstance(name, str) or name not in STRATEGIES:
        what = "there is no such strategy, and no imported module registers one"
        raise entries["strategy"].error(what, choices=STRATEGIES)
    keys = dict(keys_of(STRATEGIES[name]))
    has_capacity = "capacity" in keys
    if has_capacity:
        keys |= keys_of(_CapacityKeys)
    values = read_keys(node, keys, ignored={"strategy"})
    alpha, unit = values.pop("alpha", None), values.get("unit", _UNIT_OF.get(name, "packed_tokens"))
    if alpha is not None and unit != "cost":
        raise entries["alpha"].key_error(f"alpha has no meaning with the unit {unit}", "leave it out")
    with located(node):
        if has_capacity:
            cost = AttentionCost() if alpha is None else AttentionCost(alpha)
            values.pop("unit", None)
            values["capacity"] = Capacity(values["capacity"], unit, values.pop("multiple", 1), cost)
        made: Strategy = STRATEGIES[name](**values)
    return made


@dataclass(frozen=True)
class _CapacityKeys:
    """Keys of a capacity in a document, in addition to the strategy's own keys."""

    capacity: int
    unit: Unit = "packed_tokens"
    multiple: int = 1
    alpha: int | None = None


def to_dict(strategy: Strategy) -> dict[str, Any]:
    """Document of a strategy, for :func:`strategy_from_dict`: plain values, with all keys written out.

    Of a user's cost function only the name is written, under ``cost``: a document cannot hold the function.
    """
    document: dict[str, Any] = {"strategy": _NAMES[type(strategy)]}
    for setting in fields(strategy):
        value = getattr(strategy, setting.name)
        if not isinstance(value, Capacity):
            document[setting.name] = value
            continue
        document |= {"capacity": value.limit, "unit": value.unit, "multiple": value.multiple}
        if value.unit == "cost" and isinstance(value.cost, AttentionCost):
            document["alpha"] = value.cost.alpha
        elif value.unit == "cost":
            made_by = value.cost if hasattr(value.cost, "__qualname__") else type(value.cost)
            document["cost"] = f"{made_by.__module__}:{made_by.__qualname__}"
    return {key: value.item() if isinstance(value, np.generic) else value for key, value in document.items()}


def capacity_of(strategy: Strategy) -> Capacity | None:
    """Capacity of a strategy's micro-batches; None: it has none."""
    capacity = getattr(strategy, "capacity", None)
    return capacity if isinstance(capacity, Capacity) else None


def packing_capacity(strategy: Strategy) -> Capacity | None:
    """Capacity of a strategy's packed micro-batches; None: they are padded, or have no capacity.

    Example:
        >>> packing_capacity(ConcatSplit(64))
        Capacity(limit=64, unit='packed_tokens', ...)
    """
    capacity = capacity_of(strategy)
    return capacity if capacity is not None and capacity.adds_up else None


def describe(strategy: Strategy) -> str:
    """One line with the name and the settings of a strategy.

    Example:
        >>> describe(Fixed(2))
        'fixed (batch_size 2, sort False)'
    """
    document = to_dict(strategy)
    settings = ", ".join(f"{key} {value}" for key, value in document.items() if key != "strategy")
    return f"{document['strategy']} ({settings})"
