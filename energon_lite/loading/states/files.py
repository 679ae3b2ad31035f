"""States in files: JSON, msgpack, or the format of ``torch.save``. Reading runs no code; writing is atomic.

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

from energon_lite.errors import StateError, UsageError, did_you_mean
from energon_lite.loading.iterators.state import FORMAT, State, checked, is_count
from energon_lite.storage.files.atomic_file import write_bytes

__all__ = ["SUFFIXES", "FoundState", "find_states", "read_state_files", "write_state_file"]

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
            _check_identity(state.get("identity"))
        except StateError as error:
            raise type(error)(error.what, where=f"{name}{at}", fix=error.fix) from None
        states.append(FoundState(f"{name}{at}", dict(state)))
    return states


def _check_identity(identity: Any) -> None:
    settings = identity.get("settings") if isinstance(identity, Mapping) else None
    counts = [identity.get(name, 0) for name in ("leaves", "samples")] if isinstance(identity, Mapping) else []
    is_good = all(is_count(number, 1 << 63) for number in counts)
    if not isinstance(settings, Mapping) or not isinstance(identity.get("fingerprint"), str) or not is_good:
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
        packed: bytes = msgpack.packb(state)
        return packed
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
