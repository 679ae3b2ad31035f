"""Saved states: merged for all ranks, divided among other ranks, and in files.

Files are JSON, msgpack, or of the format of ``torch.save``. Reading runs no code; writing is atomic.

The format of a file is detected from its first bytes, not from its name. A file of ``torch.save`` may be a whole
checkpoint: the loader states in it are found at any place, and tensors are not read.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgpack

from energon_lite.errors import StateError, StateMismatchError, UsageError, counted, did_you_mean, listed
from energon_lite.loading.iterators.lane_cursor import check_topology, lanes_of, read_lanes
from energon_lite.loading.iterators.state import FORMAT, State, checked, identity_of, is_count, kind_of, shown
from energon_lite.storage.files.atomic_file import write_bytes

#: Format of a file to be written, by the suffix of its name.
SUFFIXES = {".json": "json", ".msgpack": "msgpack", ".pt": "torch", ".pth": "torch", ".bin": "torch"}

#: First bytes of a file of ``torch.save``.
_ZIP = b"PK\x03\x04"
#: First bytes of a file of ``torch.save`` before torch 1.6.
_PICKLE = b"\x80\x02"
#: Largest depth of a loader state in a checkpoint, in levels of nesting.
_DEPTH = 16
#: Largest number of lists and dicts that are searched: a small file can contain one object many times.
_MOST_PLACES = 1 << 20
#: Largest number of states in a file.
_MOST_STATES = 1 << 16
#: Largest size in bytes of a file that is not one of torch; a state takes a few KiB.
_LARGEST = 64 << 20


@dataclass(frozen=True)
class FoundState:
    """A state, with its place.

    Args:
        name: the file, and the keys that lead to the state if it is inside of a checkpoint.
        state: the state.
    """

    name: str
    state: State


def read_state_files(paths: Sequence[str | os.PathLike[str]]) -> list[FoundState]:
    """Read the loader states in files, and in the files of folders (sorted by name, numbers by value).

    Raises:
        StateError: a file is damaged, or has no loader state; the message names the file.
        FileNotFoundError: there is no such file.
    """
    found_states: list[FoundState] = []
    for path in (os.fspath(path) for path in paths):
        files = _files_of(path) if os.path.isdir(path) else [path]
        for file in files:
            states = find_states(_read(file), file)
            if not states:
                raise StateError("there is no loader state in the file", where=file, fix=_FIX)
            found_states += states
    return found_states


def find_states(value: Any, name: str) -> list[FoundState]:
    """Return the loader states inside of nested dicts and lists.

    Args:
        name: name of ``value``, for messages.

    Raises:
        StateError: one of them is damaged.
    """
    states: list[FoundState] = []
    for place, state in _nested(value, (), count(1)) if isinstance(value, (Mapping, list, tuple)) else ():
        if len(states) >= _MOST_STATES:
            raise StateError(f"more than {_MOST_STATES} loader states are in one file", where=name, fix=_FIX)
        at = "".join(f"[{key!r}]" for key in place)
        try:
            checked(state)
            _check_identity(identity_of(state))
        except StateError as error:
            raise type(error)(error.what, where=f"{name}{at}", fix=error.fix) from None
        states.append(FoundState(f"{name}{at}", dict(state)))
    return states


def _check_identity(identity: Mapping[str, Any]) -> None:
    has_both = isinstance(identity.get("settings"), Mapping) and isinstance(identity.get("fingerprint"), str)
    if not has_both or not all(is_count(identity.get(name, 0), 1 << 63) for name in ("leaves", "samples")):
        raise StateError("the state is damaged: it does not say what it belongs to", fix="use another checkpoint")


def write_state_file(path: str | os.PathLike[str], state: State) -> None:
    """Write a state, in the format given by the suffix of the file's name (see :data:`SUFFIXES`).

    The file is written completely or not at all; an existing file is replaced.

    Raises:
        UsageError: the name has another suffix.
        OSError: the file cannot be written.
    """
    path = os.fspath(path)
    suffix = os.path.splitext(path)[1]
    if suffix not in SUFFIXES:
        raise UsageError(
            f"a state file named *{suffix or ' (without an ending)'}",
            where=path,
            fix=did_you_mean(suffix, SUFFIXES, f"let the name end in one of {', '.join(SUFFIXES)}"),
        )
    write_bytes(path, _to_bytes(state, SUFFIXES[suffix]))


_FIX = "give a file of save_state_rank or save_state_global, or a checkpoint that has such a state in it"


def _to_bytes(state: State, format_: str) -> bytes:
    if format_ == "json":
        return json.dumps(state).encode() + b"\n"
    if format_ == "msgpack":
        return msgpack.packb(state)
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _files_of(folder: str) -> list[str]:
    if os.path.exists(os.path.join(folder, ".metadata")):
        raise StateError(
            "this is a checkpoint of torch.distributed.checkpoint; only the program that "
            "wrote it knows which entry is a loader state",
            where=folder,
            fix="load that entry there, and save it as a file of its own",
        )
    names = [name for name in os.listdir(folder) if os.path.splitext(name)[1] in SUFFIXES]
    if not names:
        raise StateError(f"no file in the folder ends in {', '.join(SUFFIXES)}", where=folder, fix=_FIX)
    return [os.path.join(folder, name) for name in sorted(names, key=_by_numbers)]


def _by_numbers(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _read(path: str) -> Any:
    with open(path, "rb") as file:
        head = file.read(4)
        if head.startswith((_ZIP, _PICKLE)):
            return _read_torch(path)
        if os.fstat(file.fileno()).st_size > _LARGEST:
            raise StateError("the file is neither of torch.save nor as small as a state is", where=path, fix=_FIX)
        data = head + file.read()
    if not data.strip():
        raise StateError("the file is empty", where=path, fix="use another checkpoint; its disk may have been full")
    try:
        if data.lstrip()[:1] in (b"{", b"["):
            return json.loads(data)
        return msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise _damaged(path, error) from None


def _read_torch(path: str) -> Any:
    import torch

    try:
        return torch.load(path, map_location="meta", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # neither torch nor pickle has an error class for this
        text = str(error).strip().split("\n")[0]
        if "Unsupported global" in str(error) or "GLOBAL" in str(error):
            raise StateError(
                f"the checkpoint holds objects that are not plain data, which run code when they are read: {text}",
                where=path,
                fix="save the loader's state as a file of its own: torch.save(loader.save_state_rank(), 'loader.pt')",
            ) from None
        raise _damaged(path, error) from None


def _damaged(path: str, error: Exception) -> StateError:
    text = str(error).strip().split("\n")[0] or type(error).__name__
    return StateError(
        f"the file is damaged, or not a state: {text[:200]}", where=path, fix="use another one; was it cut short?"
    )


def _nested(
    value: Mapping[Any, Any] | Sequence[Any], place: tuple[Any, ...], visits: Iterator[int]
) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """Yield all values inside of ``value`` that declare to be a loader state, with their keys."""
    if len(place) > _DEPTH:
        return
    if next(visits) > _MOST_PLACES:
        raise StateError(f"the file holds more than {_MOST_PLACES} lists and dicts", fix=_FIX)
    if isinstance(value, Mapping) and value.get("format") == FORMAT:
        yield place, value
        return
    for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
        if isinstance(inner, (Mapping, list, tuple)):
            yield from _nested(inner, (*place, key), visits)


# -- merging and redistributing --------------------------------------------------------------------------------------


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
    except StateError as error:
        raise type(error)(f"{name}: {error.what}", fix=error.fix) from None


def _check_same_step(states: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    places: dict[tuple[int, int], list[str]] = {}
    for name, state in zip(names, states, strict=True):
        places.setdefault((state["pass_number"], state["position"]), []).append(name)
    if len(places) > 1:
        shown = "\n".join(f"    {listed(who)}: pass {at[0]}, micro-batch {at[1]}" for at, who in places.items())
        raise StateMismatchError(
            f"the ranks are not at the same step:\n{shown}",
            fix="save after the same number of batches on every rank; or give as many ranks each its own state",
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
    lines = [f"    {listed(them)}: fingerprint {identity_of(most).get('fingerprint')}"] + [
        f"    {listed(who)}: fingerprint {identity_of(run).get('fingerprint')}; {', '.join(_differences(run, most))}"
        for run, who in runs
        if run is not most
    ]
    raise StateMismatchError(
        "the ranks' states belong to different data or configurations:\n" + "\n".join(lines),
        fix="build the loader from the same data and with the same arguments on every rank",
    )


def _differences(run: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the differences between two states, as text."""
    differences = []
    flat = [_flat(entries) for entries in (run, other)]
    for name in sorted({*flat[0], *flat[1]} - {"fingerprint"}):
        here, there = (shown(entries[name], 60) if name in entries else "not set" for entries in flat)
        if name not in flat[0] or name not in flat[1] or flat[0][name] != flat[1][name]:
            differences.append(f"{name}: {here}, elsewhere {there}")
    return differences[:5] or ["they are different"]


def _flat(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a state, of its identity and of the settings in it as one dict."""
    identity = dict(identity_of(run))
    settings = identity.pop("settings", {})
    rest = {name: value for name, value in run.items() if name != "identity"}
    return rest | identity | (dict(settings) if isinstance(settings, Mapping) else {})


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
            fix="give the states of all data-parallel ranks (to a command: their folder); each has its own lanes",
        )
    return [row for _, (_, row) in sorted(rows.items())]
