"""Conversion between the states of all ranks and one state of the whole run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from energon_lite.errors import StateError, StateMismatchError, counted, listed
from energon_lite.loading.iterators.lane_dataset import check_topology, lanes_of, read_lanes
from energon_lite.loading.iterators.state import State, checked, kind_of

__all__ = ["merged", "redistributed"]


def merged(states: Sequence[Any], names: Sequence[str] = ()) -> State:
    """Merge the states that the ranks of a run saved to the state of the whole run.

    Planned batches, by number or by tokens: all ranks have the same state. Lanes: each rank has its own lanes, and
    together they have all; ranks with the same lanes (tensor-parallel peers) or none are accepted.

    Args:
        states: states in any order, at least one.
        names: names of the states in errors; empty: ``state 0``, ``state 1``, ...

    Raises:
        StateError: an entry is not a state.
        StateMismatchError: ranks are at different steps, or of different runs, or lanes are missing; names them.
    """
    if not states:
        raise StateError("there is no state: all entries of the list are None", fix="give what the ranks saved")
    names = names or [f"state {number}" for number in range(len(states))]
    for name, state in zip(names, states, strict=True):
        _check_readable(name, state)
    _check_same_step(states, names)
    _check_same_run(states, names)
    if kind_of(states[0]) != "lanes":
        return dict(states[0])
    return dict(states[0]) | {"cursors": _all_lanes(states, names)}


def redistributed(state: State, world_size: int) -> list[State]:
    """Return the states of ``world_size`` ranks, given the state of the whole run.

    Raises:
        TopologyError: the lanes cannot be divided among the ranks.
        StateMismatchError: lanes are missing.
    """
    state = merged([state])
    if kind_of(state) != "lanes":
        return [dict(state) for _ in range(world_size)]
    check_topology(state["lanes"], world_size)
    rows = {row[0]: row for row in state["cursors"]}
    own = [lanes_of(state["lanes"], state["position"], rank, world_size) for rank in range(world_size)]
    return [state | {"cursors": [rows[lane] for lane in sorted(lanes)]} for lanes in own]


def _check_readable(name: str, state: Any) -> None:
    try:
        checked(state)
    except StateMismatchError as error:
        raise StateMismatchError(f"{name}: {error.what}", fix=error.fix) from None
    except StateError as error:
        raise StateError(f"{name}: {error.what}", fix=error.fix) from None


def _check_same_step(states: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    places: dict[tuple[int, int], list[str]] = {}
    for name, state in zip(names, states, strict=True):
        places.setdefault((state["pass_number"], state["position"]), []).append(name)
    if len(places) > 1:
        shown = "\n".join(f"    {listed(who)}: pass {at[0]}, micro-batch {at[1]}" for at, who in places.items())
        raise StateMismatchError(
            f"the ranks are not at the same step:\n{shown}", fix="save after the same number of batches on every rank"
        )


def _check_same_run(states: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Check that all entries but the lanes are equal."""
    runs: list[tuple[dict[str, Any], list[str]]] = []
    for name, state in zip(names, states, strict=True):
        run = {key: value for key, value in state.items() if key != "cursors"}
        who = next((who for other, who in runs if other == run), None)
        if who is None:
            runs.append((run, who := []))
        who.append(name)
    if len(runs) == 1:
        return
    most, them = max(runs, key=lambda run: len(run[1]))
    lines = [f"    {listed(them)}: fingerprint {_fingerprint(most)}"] + [
        f"    {listed(who)}: fingerprint {_fingerprint(run)}; {', '.join(_differences(run, most))}"
        for run, who in runs
        if run is not most
    ]
    raise StateMismatchError(
        "the ranks' states belong to different data or configurations:\n" + "\n".join(lines),
        fix="build the loader from the same data and with the same arguments on every rank",
    )


def _fingerprint(run: Mapping[str, Any]) -> Any:
    identity = run.get("identity")
    return identity.get("fingerprint") if isinstance(identity, Mapping) else None


def _differences(run: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the differences between two states, as text."""
    differences = []
    flat = [_flat(entries) for entries in (run, other)]
    for name in sorted({*flat[0], *flat[1]} - {"fingerprint"}):
        here, there = (_short(entries[name]) if name in entries else "not set" for entries in flat)
        if name not in flat[0] or name not in flat[1] or flat[0][name] != flat[1][name]:
            differences.append(f"{name}: {here}, elsewhere {there}")
    return differences[:5] or ["they are different"]


def _flat(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a state, of its identity and of the settings in it as one dict."""
    identity = run.get("identity")
    identity = dict(identity) if isinstance(identity, Mapping) else {}
    settings = identity.pop("settings", {})
    rest = {name: value for name, value in run.items() if name != "identity"}
    return rest | identity | (dict(settings) if isinstance(settings, Mapping) else {})


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _all_lanes(states: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[list[int]]:
    """Return the lanes of all states, each once."""
    rows: dict[int, tuple[str, list[int]]] = {}
    for name, state in zip(names, states, strict=True):
        try:
            read_lanes(state)  # only for its checks
        except StateError as error:
            raise StateError(f"{name}: {error.what}", fix=error.fix) from None
        for row in state["cursors"]:
            other, known = rows.setdefault(row[0], (name, list(row)))
            if known != list(row):
                raise StateMismatchError(
                    f"lane {row[0]} is at another place in {name} than in {other}: {list(row[1:])} and {known[1:]}",
                    fix="give the states of one moment of one run",
                )
    lanes = states[0]["lanes"]
    missing = [lane for lane in range(lanes) if lane not in rows]
    if missing:
        raise StateMismatchError(
            f"{len(missing)} of {lanes} lanes are in none of the {counted(len(states), 'state')}: {listed(missing)}",
            fix="give the states of all data-parallel ranks; each has saved the lanes of its own micro-batches",
        )
    return [row for _, (_, row) in sorted(rows.items())]
