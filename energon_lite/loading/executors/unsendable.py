"""Errors for objects that cannot be sent to another process, with the part at fault; and errors sent by workers."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from energon_lite.errors import FatalSampleError, UsageError, field_of, listed
from energon_lite.hooks import place_of
from energon_lite.loading.executors.transport import pack
from energon_lite.loading.makers.chunk_job import Made

__all__ = ["raise_of_worker", "raise_unpicklable", "unsendable"]

#: Largest number of samples that a message names.
_SHOWN = 4
#: Largest depth of nested containers that are searched.
_DEPTH = 20


def unsendable(result: Any, error: BaseException) -> FatalSampleError:
    """Return the error for the result of a job that cannot be sent.

    Args:
        result: the batch, and the other parts of the result.
        error: the error that packing it raised.
    """
    batch = result[0] if isinstance(result, tuple) and result else result
    if isinstance(batch, list) and batch and all(isinstance(entry, Made) for entry in batch):  # batches of a chunk
        parts = [made.batch for made in batch]
        parts += [item.value for made in batch if made.carried is not None for item in made.carried.items]
        batch = next((part for part in parts if _fails(pack, part)), batch)
    path, value = _culprit(pack, batch, "", _DEPTH)
    keys = field_of(batch, "__key__")
    on_device = isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta")
    return FatalSampleError(
        f"a batch cannot be sent from its worker process: {path or 'it'} is {_described(value)}",
        where=f"samples {listed(keys, _SHOWN)}" if isinstance(keys, (list, tuple)) else None,
        fix="let hooks work on the CPU, and have batches copied to the device ahead: "
        'get_savable_loader(dataset).to("cuda")'
        if on_device
        else f"leave it out, or make it what can be pickled ({str(error) or type(error).__name__}): tensors, arrays, "
        "texts, numbers, and objects of classes at the top of a module; or do without processes: num_workers=0, or "
        'start_method="thread"',
    )


def raise_unpicklable(encoder: Any, method: str, error: BaseException) -> NoReturn:
    """Raise the error for workers that cannot be started because their start method needs pickling.

    Raises:
        UsageError: names the part of the task encoder that cannot be pickled.
        BaseException: ``error`` itself, if another part cannot be pickled.
    """
    if not _fails(pickle.dumps, encoder):
        raise error
    cls = type(encoder)
    inner = "<locals>" in cls.__qualname__
    path, value = ("", encoder) if inner else _culprit(pickle.dumps, encoder, "self", _DEPTH)
    what = f"its class {cls.__qualname__} is made inside of a function" if inner else f"{path} is {_described(value)}"
    cure = "define the class at the top of a module" if inner else "make it of functions and classes that are at the "
    cure += "" if inner else "top of a module; or make it in the worker, when a hook first asks for it"
    raise UsageError(
        f"the task encoder {cls.__name__} cannot be pickled, which start_method={method!r} has to do: {what}",
        where=f"{cls.__module__}.{cls.__qualname__}",
        fix=f'{cure}; or use start_method="fork", which takes it as it is',
    ) from None


def raise_of_worker(error: BaseException) -> NoReturn:
    """Raise an error that a worker sent, with its traceback in the worker.

    Raises:
        BaseException: always.
    """
    if sys.version_info < (3, 11) and (notes := getattr(error, "__notes__", None)):  # Python 3.10 shows no notes
        raise error from RuntimeError("\n" + "\n".join(notes))
    raise error


def _culprit(dumps: Callable[[Any], Any], value: Any, path: str, depth: int) -> tuple[str, Any]:
    """Return the innermost part of a value that cannot be pickled, with its path."""
    for name, part in _parts(value) if depth else ():
        if _fails(dumps, part):
            return _culprit(dumps, part, f"{path}{name}" if path else name.lstrip("."), depth - 1)
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        yield from ((f"[{place}]", part) for place, part in enumerate(value))
    elif isinstance(value, tuple):
        yield from ((f".{name}", part) for name, part in zip(value._fields, value, strict=True))  # type: ignore[attr-defined]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, torch.Tensor)) and not callable(value):
        yield from ((f".{name}", part) for name, part in vars(value).items())


def _fails(dumps: Callable[[Any], Any], value: Any) -> bool:
    try:
        dumps(value)
    except Exception:
        return True
    return False


def _described(value: Any) -> str:
    """Return a description of a value: the place of its code, its device, or its type."""
    if (place := place_of(value)) is not None:
        return f"the function {value.__qualname__} ({place})"
    if isinstance(value, torch.Tensor):
        return f"a tensor on {value.device}"
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("a builtins.", "a ")
