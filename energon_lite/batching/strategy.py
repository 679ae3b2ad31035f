"""What all strategies have in common, and how a document names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, TypeVar

from energon_lite.batching.best_fit import BestFit
from energon_lite.batching.best_fit_decreasing import BestFitDecreasing
from energon_lite.batching.capacity import AttentionCost, Capacity, Ints, Unit, at_least_one, checked_lengths
from energon_lite.batching.concat_split import ConcatSplit
from energon_lite.batching.fixed_size import Fixed, LengthDifference, MaxLength
from energon_lite.batching.greedy import Greedy
from energon_lite.batching.micro_batches import MicroBatches, concatenate
from energon_lite.batching.sorted_window import SortedWindow
from energon_lite.documents import Node, from_plain, keys_of, located, read_keys
from energon_lite.errors import UsageError
from energon_lite.order.hashing import hash_ints

__all__ = [
    "CHUNK",
    "PLAN_VERSION",
    "STRATEGIES",
    "Strategy",
    "capacity_of",
    "describe",
    "packing_capacity",
    "plan_in_chunks",
    "read_strategy",
    "register_strategy",
    "strategy_from_dict",
    "to_dict",
]

#: Samples that are planned together: large enough for a fill as good as that of the whole, and well below a second.
CHUNK = 1 << 17
#: Raised when the same lengths would give other micro-batches than before; written into states, which are then refused.
PLAN_VERSION = 3


class Strategy(Protocol):
    """Which samples go together: a function of lengths and a seed, with no state and no I/O.

    Every strategy is a frozen dataclass, and every plan is made of integers only, so that all ranks, on any machine,
    come to the same one.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def plan(self, lengths: Ints, *, seed: int = 0, key_lengths: Ints | None = None) -> MicroBatches:
        """Micro-batches of samples ``0 .. len(lengths) - 1``, which are in stream order.

        Args:
            lengths: tokens of each sample, of all modalities together, int ``[samples]``.
            seed: for strategies that shuffle.
            key_lengths: tokens of the key field, int ``[samples]``; for strategies with a ``key``.

        Raises:
            UsageError: a sample does not fit, and the strategy says that this is an error; or arguments of wrong shape.
        """


#: The strategies by the names they have in documents.
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
    """Decorates a strategy of one's own, which documents and saved states call ``name`` from then on. The annotations
    of its fields say what its document may hold, as :mod:`energon_lite.documents.typed` reads them.

    Args:
        name: not that of another strategy; it may be the same class again, imported anew.

    Raises:
        UsageError: another class has the name, or this one is no frozen dataclass with a method ``plan``.

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
            raise UsageError(f"{cls.__name__} is no strategy", fix="make it a frozen dataclass with a method plan")
        other = STRATEGIES.get(name, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise UsageError(f"there is a strategy {name!r} already: {other.__qualname__}", fix="give another name")
        STRATEGIES[name], _NAMES[cls] = cls, name
        return cls

    return register


def plan_in_chunks(
    strategy: Strategy, lengths: Ints, *, seed: int = 0, key_lengths: Ints | None = None, chunk: int = CHUNK
) -> MicroBatches:
    """The plan of a whole epoch: that of each chunk of ``chunk`` samples, one after the other.

    A chunk's plan depends on nothing but its number, its lengths and the seed; so a position in it can be resumed from
    without the chunks before.

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
    """The strategy that a document describes.

    Args:
        document: ``strategy``, a name of :data:`STRATEGIES`, and the fields of that strategy. A capacity is written as
            ``capacity`` (an integer), with ``unit``, ``multiple`` and, for the unit ``cost``, ``alpha`` beside it.
        at: where the document stands, for messages.

    Raises:
        ConfigError: a key or a value is wrong; the message names it.

    Example:
        >>> strategy_from_dict({"strategy": "best_fit", "capacity": 12000, "open_bins": 16})
        BestFit(capacity=Capacity(limit=12000, unit='packed_tokens', ...), open_bins=16, ...)
    """
    return read_strategy(from_plain(document, "", at))


def read_strategy(node: Node) -> Strategy:
    """The same of a document that was read, so that messages have its file and lines.

    Raises:
        ConfigError: as :func:`strategy_from_dict`.
    """
    entries = node.entries()
    if "strategy" not in entries:
        raise node.error("the key 'strategy' is missing", expected="the name of one", choices=STRATEGIES)
    name = entries["strategy"].value
    if not isinstance(name, str) or name not in STRATEGIES:
        raise entries["strategy"].error("there is no such strategy", choices=STRATEGIES)
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
    """A capacity as it stands in a document, beside the strategy's own keys."""

    capacity: int
    unit: Unit = "packed_tokens"
    multiple: int = 1
    alpha: int | None = None


def to_dict(strategy: Strategy) -> dict[str, Any]:
    """The document of a strategy, which :func:`strategy_from_dict` reads: plain values, all keys written out.

    A cost function of the caller's own is named only, under ``cost``: a document cannot hold it.
    """
    document: dict[str, Any] = {"strategy": _NAMES[type(strategy)]}
    for one in fields(strategy):
        value = getattr(strategy, one.name)
        if not isinstance(value, Capacity):
            document[one.name] = value
            continue
        document |= {"capacity": value.limit, "unit": value.unit, "multiple": value.multiple}
        if value.unit == "cost" and isinstance(value.cost, AttentionCost):
            document["alpha"] = value.cost.alpha
        elif value.unit == "cost":
            made_by = value.cost if hasattr(value.cost, "__qualname__") else type(value.cost)
            document["cost"] = f"{made_by.__module__}:{made_by.__qualname__}"
    return document


def capacity_of(strategy: Strategy) -> Capacity | None:
    """What a micro-batch may hold; None: the strategy has no capacity."""
    capacity = getattr(strategy, "capacity", None)
    return capacity if isinstance(capacity, Capacity) else None


def packing_capacity(strategy: Strategy) -> Capacity | None:
    """What a packed micro-batch may hold; None: the strategy's micro-batches are padded, or have no capacity.

    Example:
        >>> packing_capacity(ConcatSplit(64))
        Capacity(limit=64, unit='packed_tokens', ...)
    """
    capacity = capacity_of(strategy)
    return capacity if capacity is not None and capacity.adds_up else None


def describe(strategy: Strategy) -> str:
    """One line: the name and the settings.

    Example:
        >>> describe(Fixed(2))
        'fixed (batch_size 2, sort False)'
    """
    document = to_dict(strategy)
    settings = ", ".join(f"{key} {value}" for key, value in document.items() if key != "strategy")
    return f"{document['strategy']} ({settings})"
