"""Where a run is: a few integers, and how they are written down.

The cursor counts micro-batches *delivered to the user*, over all ranks together. Prefetching, workers and their number
do not show in it. Since every rank computes the same global sequence, the cursor of one rank is the cursor of all, and
a state may be restored on any number of ranks: they go on from ``position``, each with its share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from energon_lite.errors import StateError, StateMismatchError
from energon_lite.loading.iterators.identity import Identity
from energon_lite.loading.iterators.plain_state import check_plain, damaged, is_count, shown
from energon_lite.loading.iterators.rebase_entry import rebase_entry
from energon_lite.order import ORDER_VERSION, Order
from energon_lite.order.permutation import MAX_LENGTH
from energon_lite.order.rebase import Rebase

__all__ = [
    "FORMAT",
    "KINDS",
    "Cursor",
    "check_reach",
    "checked",
    "from_state",
    "header",
    "kind_of",
    "ranks_entry",
    "read_ranks",
    "to_state",
]

#: What a state has under ``format``.
FORMAT = "energon_lite.loader"
#: Raised when the meaning of a state changes. A state says the lowest version that can express it: 1 knows planned
#: batches only, 2 has a ``kind``, 3 a ``rebase``.
_VERSION = 3

#: What a state can be about, in words.
KINDS = {
    "planned": "of batches that are planned ahead",
    "lanes": "of batches whose content decides how many there are",
    "tokens": "of batches that are planned by their tokens",
}


#: A number from which on a state is damaged: no run gets so far, and sums of such numbers are still 64-bit ones.
_MOST_PASSES, _MOST_BATCHES = 1 << 40, 1 << 60


@dataclass(frozen=True)
class Cursor:
    """A place in the run.

    Args:
        pass_number: finished passes over a finite stream.
        position: micro-batches of this pass that were delivered, over all ranks.
        loop_start: the position at which the running ``for`` loop began (virtual epochs of an endless stream).
        ranks: on so many ranks the pass began, which its limit counts; None: it begins on those there are.
    """

    pass_number: int = 0
    position: int = 0
    loop_start: int = 0
    ranks: int | None = None

    def step(self, world_size: int, count: int | None) -> Cursor:
        """After one more micro-batch on every rank."""
        position = self.position + world_size
        return replace(self, position=position if count is None else min(position, count))


def to_state(
    cursor: Cursor, identity: Identity, rebase: Rebase | None = None, *, ranks: int | None = None
) -> dict[str, Any]:
    """The state: plain integers, strings, lists and dicts; JSON, msgpack and ``torch.load(weights_only=True)`` take
    it.

    Args:
        ranks: with a limit: on so many the pass began.
    """
    return {
        **header("planned", rebase),
        "pass_number": cursor.pass_number,
        "position": cursor.position,
        "loop_start": cursor.loop_start,
        **ranks_entry(ranks),
        **rebase_entry(rebase),
        "identity": identity.at(cursor.position).to_plain(),
    }


def ranks_entry(ranks: int | None) -> dict[str, int]:
    """What a state has of a pass with a limit, which is one for each rank: the number of ranks on which it began. So it
    has as many batches in all if it goes on on others."""
    return {} if ranks is None else {"ranks": ranks}


def read_ranks(state: Mapping[str, Any]) -> int | None:
    """The ranks that a state says its pass began on; None: it has no limit, or has not begun.

    Raises:
        StateError: it is damaged.
    """
    ranks = state.get("ranks")
    if ranks is not None and (not isinstance(ranks, int) or isinstance(ranks, bool) or not 0 < ranks < 1 << 32):
        raise StateError(f"the state is damaged: ranks is {ranks!r}", fix="use another checkpoint")
    return ranks if state.get("position") else None


def header(kind: str, rebase: Rebase | None = None) -> dict[str, Any]:
    """The first entries of a state."""
    version = 3 if rebase is not None else 1 if kind == "planned" else 2
    state = {"format": FORMAT, "version": version, "order_version": ORDER_VERSION}
    return state if kind == "planned" else state | {"kind": kind}


def kind_of(state: Mapping[str, Any]) -> Any:
    """What a state is about: ``"planned"``, ``"lanes"`` or ``"tokens"``."""
    return state.get("kind", "planned")


def from_state(state: Any, identity: Identity) -> Cursor:
    """The cursor of a saved state, after checking that it belongs to this very run.

    Args:
        state: what :func:`to_state` made, perhaps by way of JSON.
        identity: the data and configuration of the loader that restores it.

    Raises:
        StateError: not a state, a damaged one, or one of a format that this version does not know.
        StateMismatchError: a state of other data, another configuration or another order; says what differs.
    """
    cursor = Cursor(**checked(state, "planned"), ranks=read_ranks(state))
    identity.at(cursor.position).check(state.get("identity"))
    return cursor


def checked(state: Any, kind: str) -> dict[str, int]:
    """Check a state, but not what it belongs to, and return the numbers that all kinds have: ``pass_number``,
    ``position``, ``loop_start``.

    Args:
        kind: what it has to be about.

    Raises:
        StateError, StateMismatchError: see :func:`from_state`.
    """
    name = state.get("format") if isinstance(state, Mapping) else None
    if not isinstance(name, str) or name != FORMAT:
        raise StateError(
            f"this is not a loader state: a {type(state).__name__}, {shown(state, 60)}",
            fix="give what save_state_rank or save_state_global returned",
        )
    check_plain(state)
    version = state.get("version")
    if not isinstance(version, int) or not 1 <= version <= _VERSION:
        newer = isinstance(version, int) and version > _VERSION
        raise StateError(
            f"the state has format version {version!r}, this energon_lite reads versions up to {_VERSION}",
            fix="upgrade energon_lite" if newer else "save the state again",
        )
    if state.get("order_version") != ORDER_VERSION:
        raise StateMismatchError(
            f"the state was saved under order version {state.get('order_version')!r}, this energon_lite has "
            f"{ORDER_VERSION}: the same positions would be other samples",
            fix="resume with the release that saved it, or start afresh",
        )
    found = kind_of(state)
    if not isinstance(found, str) or found not in KINDS:
        raise damaged("kind", found)
    numbers = {name: state.get(name) for name in ("pass_number", "position", "loop_start")}
    for name, value in numbers.items():
        if not is_count(value, _MOST_PASSES if name == "pass_number" else _MOST_BATCHES):
            raise damaged(name, value)
    if state["loop_start"] > state["position"]:
        raise damaged("loop_start", state["loop_start"])
    if found != kind:
        raise StateMismatchError(
            f"the state is one {KINDS[found]}, and this loader one {KINDS[kind]}",
            fix="build the loader with the hooks, packing_buffer_size and batching with which the state was saved",
        )
    return numbers


def check_reach(order: Order, pass_number: int, samples: int) -> None:
    """Refuse a place that an order does not reach, after the state's identity was checked.

    Args:
        samples: the number of samples of the pass before the place.

    Raises:
        StateError: it is out of reach.
    """
    bounds = order.bounds(pass_number) or (0, samples)
    if max(bounds[1], samples) >= MAX_LENGTH // 2:
        raise damaged("position", f"behind {samples} samples of pass {pass_number}")
