"""Card of a run: fingerprints of data, code and environment, which trainer and worker compare."""

from __future__ import annotations

import hashlib
import inspect
import platform
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

import energon_lite
from energon_lite.errors import EnergonLiteError, listed
from energon_lite.extras.remote_workers.handshake import RefusedError
from energon_lite.loading.iterators.dataset import Identity
from energon_lite.loading.makers.job_runner import JobRunner

__all__ = ["check_card", "run_card"]

#: Packages whose versions decide the values of decoded samples.
_PACKAGES = ("torch", "numpy", "pillow", "simplejpeg", "torchcodec", "av", "webdataset")
#: Folders of code that is known by its version.
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OWN = str(Path(energon_lite.__file__).parent)
#: Attributes of a task encoder that are compared, and the depth to which they are.
_MOST_ATTRIBUTES, _DEPTH = 500, 5
#: Characters of a value that a message shows.
_SHOWN = 60


def run_card(identity: Mapping[str, Any], runner: JobRunner) -> dict[str, Any]:
    """Return the card of a run, as plain data.

    Args:
        identity: identity of the data set, as it is stored in states.
        runner: runner of its jobs.
    """
    encoder = runner.encoder
    kind = type(encoder)
    return {
        "environment": _environment(),
        "data": dict(identity),
        "seed": str(runner.seed),
        "runner": type(runner).__qualname__,
        "encoder": kind.__qualname__,
        "code": _code_of(kind),
        "attributes": dict(_first(_attributes(vars(encoder), "self", _DEPTH))),
    }


def check_card(theirs: Mapping[str, Any], ours: Mapping[str, Any], identity: Identity) -> None:
    """Compare the card of a trainer with that of this worker.

    Raises:
        RefusedError: they differ; the message names the differences.
    """
    found = list(_differences(theirs, ours))
    if theirs.get("data") != ours["data"]:
        found += _data_differences(theirs.get("data"), identity)
    if found:
        raise RefusedError(f"the trainer runs something else than this worker: {listed(found, 5)}")


def _data_differences(theirs: Any, identity: Identity) -> list[str]:
    """Return the differences of the data, and of settings that decide the order."""
    try:
        identity.check(theirs)
    except EnergonLiteError as error:
        _, *lines = error.what.replace("in the state", "at the trainer").split("\n")
        return [line.strip() for line in lines] or [error.what]
    return ["the data set"]


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    for part, label in (
        ("encoder", "the task encoder is {0} at the trainer and {1} here"),
        ("runner", "batches are made by a {0} at the trainer and by a {1} here"),
        ("seed", "the seed is {0} at the trainer and {1} here (seed_offset)"),
    ):
        if theirs.get(part) != ours[part]:
            yield label.format(theirs.get(part), ours[part])
    for part, label in (
        ("environment", "{0} is {1} at the trainer and {2} here"),
        ("code", "the code of the task encoder in {0} differs"),
        ("attributes", "the task encoder's {0} is {1} at the trainer and {2} here"),
    ):
        there, here = theirs.get(part), ours[part]
        there = there if isinstance(there, Mapping) else {}
        for name in sorted({*there, *here}, key=str):
            if there.get(name) != here.get(name):
                yield label.format(name, there.get(name, "missing"), here.get(name, "missing"))


@lru_cache(maxsize=1)
def _environment() -> dict[str, str]:
    python = platform.python_version().rpartition(".")[0]
    versions = {"energon_lite": energon_lite.__version__, "Python": python}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name).partition("+")[0]  # "+cpu" and "+cu126" are one version
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    return versions | {"byte order": sys.byteorder}


def _code_of(kind: type) -> dict[str, str]:
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
        found[file.name] = _short(found.get(file.name, "").encode() + file.read_bytes())
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


def _first(attributes: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for _, pair in zip(range(_MOST_ATTRIBUTES), attributes, strict=False):
        yield pair


def _attributes(values: Mapping[Any, Any], path: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield paths and texts of the plain values in a task encoder."""
    for name, value in values.items():
        at = f"{path}.{name}" if isinstance(name, str) else f"{path}[{name!r}]"
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, np.generic, Path)):
            yield at, _shown(repr(value))
        elif isinstance(value, torch.Tensor):
            memory = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            yield at, f"a tensor {list(value.shape)} {_short(memory)}"
        elif isinstance(value, np.ndarray) and value.dtype.kind != "O":
            yield at, f"an array {list(value.shape)} {_short(value.tobytes())}"
        elif inspect.isfunction(value) or inspect.ismethod(value) or isinstance(value, type):
            yield at, value.__qualname__
        elif not depth:
            continue
        elif isinstance(value, Mapping):
            yield from _attributes(value, at, depth - 1)
        elif isinstance(value, (list, tuple)):
            yield from _attributes(dict(enumerate(value)), at, depth - 1)
        else:
            yield at, type(value).__qualname__
            yield from _attributes(getattr(value, "__dict__", {}), at, depth - 1)


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... {_short(text.encode())}"


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
