"""The states of all ranks as one, and one as the states of any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from energon_lite.errors import StateError, StateMismatchError
from energon_lite.loading.cursor import checked, kind_of
from energon_lite.loading.lane_cursor import check_topology, lanes_of, read_lanes
from energon_lite.loading.walk import State

__all__ = ["dealt", "merged"]


def merged(states: Sequence[Any]) -> State:
    """The state of the whole run, of what its ranks saved.

    Planned batches, by number or by tokens: all ranks have the same state. Lanes: each rank has its own, and together
    they are all lanes; ranks that saved the same (tensor-parallel peers) or nothing (no lanes) do no harm.

    Args:
        states: in any order, at least one.

    Raises:
        StateError: not states.
        StateMismatchError: ranks are at different steps, or of different runs, or lanes are missing; names them.
    """
    if not states:
        raise StateError("there is no state: all entries of the list are None", fix="give what the ranks saved")
    for number, state in enumerate(states):
        _check_readable(number, state)
    _check_same_step(states)
    _check_same_run(states)
    if kind_of(states[0]) != "lanes":
        return dict(states[0])
    return dict(states[0]) | {"cursors": _all_lanes(states)}


def dealt(state: State, world_size: int) -> list[State]:
    """A whole run's state as those of so many ranks.

    Raises:
        TopologyError: the lanes cannot be divided among them.
        StateMismatchError: lanes are missing.
    """
    state = merged([state])
    if kind_of(state) != "lanes":
        return [dict(state) for _ in range(world_size)]
    check_topology(state["lanes"], world_size)
    rows = {row[0]: row for row in state["cursors"]}
    own = [lanes_of(state["lanes"], state["position"], rank, world_size) for rank in range(world_size)]
    return [state | {"cursors": [rows[lane] for lane in sorted(lanes)]} for lanes in own]


def _check_readable(number: int, state: Any) -> None:
    try:
        checked(state, kind_of(state) if isinstance(state, Mapping) else "planned")
    except StateMismatchError:
        raise
    except StateError as error:
        raise StateError(f"state {number} of the list: {error.what}", fix=error.fix) from None


def _check_same_step(states: Sequence[Mapping[str, Any]]) -> None:
    places = [(state["pass_number"], state["position"]) for state in states]
    if len(set(places)) > 1:
        listed = "\n".join(f"    rank {rank}: pass {at[0]}, micro-batch {at[1]}" for rank, at in enumerate(places))
        raise StateMismatchError(
            f"the ranks are not at the same step:\n{listed}", fix="save after the same number of batches on every rank"
        )


def _check_same_run(states: Sequence[Mapping[str, Any]]) -> None:
    """All but the lanes must be equal."""
    runs = [{name: value for name, value in state.items() if name != "cursors"} for state in states]
    if any(run != runs[0] for run in runs):
        raise StateMismatchError(
            "the ranks' states belong to different data or configurations",
            fix="build the loader from the same data and with the same arguments on every rank",
        )


def _all_lanes(states: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The lanes of all states, each once."""
    rows: dict[int, tuple[int, list[int]]] = {}
    for number, state in enumerate(states):
        read_lanes(state)  # for its checks
        for row in state["cursors"]:
            other, known = rows.setdefault(row[0], (number, list(row)))
            if known != list(row):
                raise StateMismatchError(
                    f"lane {row[0]} is at another place in state {number} of the list than in state {other}: "
                    f"{list(row[1:])} and {known[1:]}",
                    fix="give the states of one moment of one run",
                )
    lanes = states[0]["lanes"]
    missing = [lane for lane in range(lanes) if lane not in rows]
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise StateMismatchError(
            f"{len(missing)} of {lanes} lanes are in none of the {len(states)} states: {shown}",
            fix="give the states of all data-parallel ranks; each has saved the lanes of its own micro-batches",
        )
    return [row for _, (_, row) in sorted(rows.items())]
