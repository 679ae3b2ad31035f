"""Properties of a task encoder: its hooks that are in use; and its fingerprints: digests of its code, and the values
that it is made with."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from energon_lite.hooks.base import AugmentTaskEncoder, DefaultTaskEncoder, TaskEncoder
from energon_lite.hooks.global_generators import asks_for_seeds, failure_tolerance_of, restores_seeds

#: All hooks that process samples, in the order in which they run.
HOOK_ORDER = (
    "cook_crude_sample",
    "preencode_sample",
    "encode_sample",
    "select_samples_to_pack",
    "postencode_sample",
    "pack_selected_samples",
    "sample_length",
    "sample_costs",
    "batch_group_criterion",
    "batch",
    "encode_batch",
    "empty_batch",
)


@dataclass(frozen=True)
class Hooks:
    """Names of the hooks that a loader calls, and their effect on batches.

    Args:
        sample: hooks that run on each sample, in order; with packing, before the selection.
        selected: hooks that run on each sample that was selected for a pack.
        packs: True if samples are packed.
        groups: True if batches consist of groups.
        batched: True if samples are batched.
        generators: hooks that yield any number of results.
        by_tokens: True if batches are made by the lengths of encoded samples.

    Example:
        >>> hooks_of(TaskEncoder(), packing=False, batched=True).sample
        ('encode_sample',)
    """

    sample: tuple[str, ...]
    selected: tuple[str, ...]
    packs: bool
    groups: bool
    batched: bool
    generators: frozenset[str]
    by_tokens: bool = False

    @property
    def content_decides(self) -> bool:
        """True if the number of samples and batches is unknown before the hooks have run."""
        return self.packs or self.groups or self.by_tokens or bool(self.generators)

    @property
    def whole_chunks(self) -> bool:
        """True if the contents of any batch depend on all samples of its chunk."""
        return self.groups or self.by_tokens


def hooks_of(encoder: TaskEncoder, *, packing: bool, batched: bool, by_tokens: bool = False) -> Hooks:
    """Determine the hooks of an encoder that are in use.

    Args:
        packing: True if there is a ``packing_buffer_size``.
        batched: True if there is a ``batch_size``.
        by_tokens: True if batches are made by the lengths of encoded samples.
    """
    first = "preencode_sample" if is_overridden(encoder, "preencode_sample") else "encode_sample"
    last = ("postencode_sample",) if is_overridden(encoder, "postencode_sample") else ()
    groups = is_overridden(encoder, "batch_group_criterion")
    batched = batched or groups or by_tokens
    called = [first, *last]
    called += ["pack_selected_samples"] if packing else []
    called += ["batch", "encode_batch"] if batched else []
    return Hooks(
        sample=(first,) if packing else (first, *last),
        selected=last if packing else (),
        packs=packing,
        groups=groups,
        batched=batched,
        generators=frozenset(name for name in called if is_generator(encoder, name)),
        by_tokens=by_tokens,
    )


def layers_of(encoder: TaskEncoder) -> Iterator[TaskEncoder]:
    """Yield the encoder, and the encoders that it wraps, from outer to inner."""
    yield encoder
    while isinstance(encoder, AugmentTaskEncoder):
        encoder = encoder.task_encoder
        yield encoder


def owner_of(encoder: TaskEncoder, name: str) -> TaskEncoder:
    """The encoder itself, or of the encoders that it wraps, the outermost that has a hook of its own."""
    if not isinstance(encoder, AugmentTaskEncoder):
        return encoder
    default = getattr(AugmentTaskEncoder, name, None)  # sample_length is no method of every encoder
    *outer, inmost = layers_of(encoder)
    return next((layer for layer in outer if getattr(type(layer), name, None) is not default), inmost)


def hook_of(encoder: TaskEncoder, name: str) -> Any:
    """Function of a hook, from the class of the encoder or of the encoder that it wraps. A default yields to a function
    set on the instance; a user's hook decides by itself what it is, also if a wrapper is set on the instance."""
    owner = owner_of(encoder, name)
    function = getattr(type(owner), name, None)
    return vars(owner).get(name) or function if function in _defaults(name) else function


def is_overridden(encoder: TaskEncoder, name: str) -> bool:
    """True if a hook is the user's own."""
    return hook_of(encoder, name) not in _defaults(name)


def _defaults(name: str) -> tuple[Any, Any]:
    return getattr(TaskEncoder, name, None), getattr(DefaultTaskEncoder, name, None)


def returns_its_argument(encoder: TaskEncoder, name: str) -> bool:
    """True if a hook is the default ``encode_sample`` or ``encode_batch``, and returns its argument unchanged."""
    made = {"encode_sample": "encoded_sample_type", "encode_batch": "batch_type"}.get(name)
    return made is not None and not is_overridden(encoder, name) and getattr(encoder, made, None) is None


def own_hooks(encoder: TaskEncoder) -> frozenset[str]:
    """Names of the hooks with user code."""
    return frozenset(name for name, _ in _own_functions(encoder))


def seeded_hooks(encoder: TaskEncoder) -> frozenset[str]:
    """Names of the user hooks that need the global generators seeded: all without ``restore_seeds=False``."""
    return frozenset(name for name, function in _own_functions(encoder) if restores_seeds(function))


def always_seeded(encoder: TaskEncoder) -> frozenset[str]:
    """Names of the user hooks that ask for seeds: ``restore_seeds=True``."""
    return frozenset(name for name, function in _own_functions(encoder) if asks_for_seeds(function))


def failure_tolerances(encoder: TaskEncoder) -> dict[str, int]:
    """Tolerances of the hooks that have one of their own. Of several cookers the strictest counts; 0: no limit."""
    tolerances: dict[str, int] = {}
    for name, function in _own_functions(encoder):
        tolerance = failure_tolerance_of(function)
        if tolerance is not None:
            tolerances[name] = min(tolerances.get(name) or tolerance, tolerance or tolerances.get(name, 0))
    return tolerances


def _own_functions(encoder: TaskEncoder) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in HOOK_ORDER:
        if is_overridden(encoder, name):
            yield name, hook_of(encoder, name)
    for cooker in encoder.cookers:
        yield "cook_crude_sample", cooker.cook


def is_generator(encoder: TaskEncoder, name: str) -> bool:
    """True if a hook is written with ``yield``."""
    return inspect.isgeneratorfunction(inspect.unwrap(hook_of(encoder, name)))


#: Folders of code that is known by its version, and the names of folders of installed packages, wherever they are.
_KNOWN = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(__file__).parents[1])
_INSTALLED = {"site-packages", "dist-packages"}
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
    if file is None or file.startswith(_KNOWN) or not file.endswith(".py"):
        return None
    path = Path(file)
    return path if path.is_file() and _INSTALLED.isdisjoint(path.parts) else None


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
