"""Fingerprints of task encoders: digests of their code, and the values that they are made with."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from energon_lite.hooks.base import TaskEncoder

#: Folders of code that is known by its version.
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OWN = str(Path(__file__).parents[1])
#: Levels of objects within objects that are read.
_DEPTH = 5
#: Characters of a value that a text has.
_SHOWN = 60


def code_hash(encoder: TaskEncoder) -> str:
    """Hash the files that define the encoder's classes and cookers, without those of this library."""
    names = {cls.__module__ for cls in type(encoder).__mro__}
    names |= {cooker.cook.__module__ for cooker in encoder.cookers}
    names -= {"builtins", "abc", "typing"}
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(name for name in names if name.partition(".")[0] != "energon_lite"):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path and os.path.isfile(path):
            with open(path, "rb") as file:
                digest.update(name.encode() + b"\0" + file.read())
    return digest.hexdigest()


def code_digests(kind: type) -> dict[str, str]:
    """Return digests of the files with a user's code that a class is made of, by name of the file."""
    found: dict[str, str] = {}
    waiting = [sys.modules.get(base.__module__) for base in kind.__mro__]
    seen: set[int] = set()
    while waiting:
        module = waiting.pop()
        file = None if module is None else _file_of(module)
        if module is None or id(module) in seen or file is None:
            continue
        seen.add(id(module))
        found[file.name] = _digest(found.get(file.name, "").encode() + file.read_bytes())
        for value in [*vars(module).values()]:
            if isinstance(value, ModuleType):
                waiting.append(value)
            elif inspect.isclass(value) or inspect.isfunction(value):
                waiting.append(sys.modules.get(value.__module__))
    return found


def _file_of(module: ModuleType) -> Path | None:
    """Return the file of a module of a user; None: it is known by the version of its package."""
    file = getattr(module, "__file__", None)
    if file is None or file.startswith((*_INSTALLED, _OWN)) or not file.endswith(".py"):
        return None
    path = Path(file)
    return path if path.is_file() else None


def attributes(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the paths and texts of the plain values in an object, equal in each process: attributes of objects and of a
    user's task encoder class, entries of containers, defaults of functions and variables of the functions around them.

    Args:
        value: the object.
        path: its name.

    Example:
        >>> dict(attributes({"size": 336, "crop": (1, 2)}, "self"))
        {'self.size': '336', 'self.crop[0]': '1', 'self.crop[1]': '2'}
    """
    return _attributes(value, path, _DEPTH, {})


def _attributes(value: Any, path: str, depth: int, seen: dict[int, Any]) -> Iterator[tuple[str, str]]:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, np.generic, Path)):
        yield path, _shown(repr(value))
        return
    if id(value) in seen:
        return
    seen[id(value)] = value  # kept, so that no other object gets its number
    if isinstance(value, torch.Tensor):
        memory = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield path, f"a tensor {list(value.shape)} {_digest(memory)}"
    elif isinstance(value, np.ndarray):
        data = repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
        yield path, f"an array {list(value.shape)} {_digest(data)}"
    elif isinstance(value, (type, ModuleType)):
        yield path, value.__name__
    else:
        if not isinstance(value, (Mapping, list, tuple, set, frozenset)):
            yield path, getattr(value, "__qualname__", type(value).__qualname__)
        for name, part in _parts(value) if depth else ():
            if name == "device_decoder" and isinstance(value, TaskEncoder):
                continue  # no worker uses it, and it changes when it is opened for a device
            at = f"{path}.{name}" if isinstance(name, str) and name.isidentifier() else f"{path}[{name!r}]"
            yield from _attributes(part, at, depth - 1, seen)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the names and values of the parts of an object."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif isinstance(value, (set, frozenset)):
        yield from enumerate(sorted(value, key=repr))
    elif inspect.isfunction(value):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # it has no value yet
                yield name, cell.cell_contents
        yield from enumerate([value.__defaults__, value.__kwdefaults__])
    else:
        yield from getattr(value, "__dict__", {}).items()
        for cls in type(value).__mro__ if isinstance(value, TaskEncoder) else ():
            if cls.__module__.partition(".")[0] not in ("energon_lite", "builtins"):
                yield from ((name, part) for name, part in vars(cls).items() if name[:2] != "__")


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... {_digest(text.encode())}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
