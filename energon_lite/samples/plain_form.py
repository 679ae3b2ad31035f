"""Plain form of samples and batches: bytes that are read without running code, and are equal for equal values.

A form is a header in msgpack, then the memory of arrays and tensors, each aligned to 64 bytes. Classes of samples are
named by module and class; to read one, its module is imported, and its fields are set without a call of its code.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import msgpack
import numpy as np
import torch

from energon_lite.errors import DecodeError

__all__ = ["NotPlainError", "from_plain", "to_plain"]

#: Alignment of the memory of an array, in bytes.
_ALIGNMENT = 64
#: Size of the header, in bytes.
_LEAD = struct.Struct("<Q")

# Codes of values that msgpack does not know.
_TUPLE, _ARRAY, _TENSOR, _SCALAR, _RECORD, _LARGE_INT = range(1, 7)


class NotPlainError(TypeError):
    """Error for a value that has no plain form."""


def to_plain(value: Any) -> list[memoryview]:
    """Return the plain form of a value, in parts that follow each other. The memory of arrays is not copied.

    Args:
        value: None, a bool, number, text, bytes, list, tuple, dict, numpy array or number, or dense tensor on the CPU
            without a gradient; or an instance of a dataclass or a named tuple at the top of a module; of such values.

    Raises:
        NotPlainError: a part of it is of another type.

    Example:
        >>> from_plain(memoryview(b"".join(to_plain({"pixels": np.arange(3), "key": ("a", 1)}))))
        {'pixels': array([0, 1, 2]), 'key': ('a', 1)}
    """
    memory: list[memoryview] = []

    def packed(part: Any) -> bytes:
        data: bytes = msgpack.packb(part, default=other, strict_types=True)
        return data

    def other(part: Any) -> msgpack.ExtType:
        kind = type(part)
        if kind is tuple:
            return msgpack.ExtType(_TUPLE, packed([*part]))
        if kind is int:
            return msgpack.ExtType(_LARGE_INT, packed(f"{part}"))
        if isinstance(part, (np.ndarray, np.generic)) and _is_of_numbers(part):
            if kind is not np.ndarray:
                return msgpack.ExtType(_SCALAR, packed([part.dtype.str, part.tobytes()]))
            memory.append(memoryview(np.ascontiguousarray(part).reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
            return msgpack.ExtType(_ARRAY, packed([part.dtype.str, [*part.shape], memory[-1].nbytes]))
        if kind is torch.Tensor and _is_dense(part):
            flat = part.contiguous().reshape(-1)
            memory.append(memoryview(flat.view(torch.uint8).numpy() if part.numel() else b""))
            dtype = str(part.dtype).removeprefix("torch.")
            return msgpack.ExtType(_TENSOR, packed([dtype, [*part.shape], memory[-1].nbytes]))
        names = _field_names(kind)  # type: ignore[arg-type]  # a class is hashable
        if names is not None and _find_class(kind.__module__, kind.__qualname__) is kind:
            fields = {name: getattr(part, name) for name in names}
            return msgpack.ExtType(_RECORD, packed([kind.__module__, kind.__qualname__, fields]))
        raise NotPlainError(f"a {kind.__module__}.{kind.__qualname__} has no plain form")

    header = memoryview(packed(value))
    parts = [memoryview(_LEAD.pack(header.nbytes)), header]
    filled = _LEAD.size + header.nbytes
    for part in memory:
        parts += [memoryview(bytes(-filled % _ALIGNMENT)), part]
        filled += -filled % _ALIGNMENT + part.nbytes
    return parts


def from_plain(form: memoryview) -> Any:
    """Return the value of a plain form; its arrays and tensors refer to the form's memory.

    Raises:
        DecodeError: it is not a plain form, or names a class that does not exist here.
    """
    try:
        (size,) = _LEAD.unpack_from(form)
        at = _LEAD.size + size

        def taken(nbytes: int) -> memoryview:
            nonlocal at
            start = at + -at % _ALIGNMENT
            at = start + nbytes
            if nbytes < 0 or at > form.nbytes:
                raise ValueError(f"{at} bytes are needed, there are {form.nbytes}")
            return form[start:at]

        def unpacked(data: bytes | memoryview) -> Any:
            return msgpack.unpackb(data, ext_hook=other, strict_map_key=False)

        def other(code: int, data: bytes) -> Any:
            return _READERS[code](unpacked(data), taken)

        return unpacked(form[_LEAD.size : at])
    except Exception as error:
        raise DecodeError(
            f"the plain form of a sample cannot be read: {type(error).__name__}: {error}",
            fix="write it again, with the same version of the code",
        ) from error


def _is_of_numbers(part: Any) -> bool:
    return not part.dtype.hasobject and part.dtype.names is None


def _is_dense(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    return is_plain and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())


@cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Return the names of the fields of a dataclass or a named tuple; None: it is another class."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return tuple(kind._fields) if issubclass(kind, tuple) and hasattr(kind, "_fields") else None


@cache
def _find_class(module: str, name: str) -> Any:
    """Return the class at the top of a module; None: there is none."""
    return getattr(import_module(module), name, None) if name.isidentifier() else None


def _record(content: Sequence[Any], _: Callable[[int], memoryview]) -> Any:
    module, name, fields = content
    kind = _find_class(module, name)
    if not isinstance(kind, type) or (names := _field_names(kind)) is None or set(fields) != set(names):
        raise ValueError(f"{module}.{name} is no class with the fields {', '.join(fields)}")
    if issubclass(kind, tuple):
        return kind._make(fields[field] for field in names)  # type: ignore[attr-defined]
    record = object.__new__(kind)
    for field, value in fields.items():
        object.__setattr__(record, field, value)
    return record


def _array(content: Sequence[Any], taken: Callable[[int], memoryview]) -> np.ndarray[Any, Any]:
    dtype, shape, nbytes = content
    return np.frombuffer(taken(nbytes), dtype=np.dtype(dtype)).reshape(shape)


def _tensor(content: Sequence[Any], taken: Callable[[int], memoryview]) -> torch.Tensor:
    name, shape, nbytes = content
    dtype = getattr(torch, name)
    memory = taken(nbytes)
    return (
        torch.frombuffer(memory, dtype=dtype).reshape(shape) if nbytes else torch.empty(0, dtype=dtype).reshape(shape)
    )


_READERS: dict[int, Callable[[Any, Callable[[int], memoryview]], Any]] = {
    _TUPLE: lambda content, _: tuple(content),
    _LARGE_INT: lambda content, _: int(content),
    _SCALAR: lambda content, _: np.frombuffer(content[1], dtype=np.dtype(content[0]))[0],
    _ARRAY: _array,
    _TENSOR: _tensor,
    _RECORD: _record,
}
