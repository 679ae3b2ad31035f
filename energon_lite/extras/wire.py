"""Objects as bytes without pickle: msgpack for the structure, raw memory for tensors and arrays.

What comes from another machine makes no code run: only known kinds of values are made. Classes are looked up among
those that this process has imported already; only dataclasses, named tuples, enumerations and errors are accepted.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from functools import lru_cache, partial
from types import MemberDescriptorType
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch

from energon_lite.batching.digests import AddressList
from energon_lite.errors import FatalSampleError, UsageError, listed
from energon_lite.loading.executors.transport import Message, message_of, parts_of
from energon_lite.samples.sample import CrudeSample, SourceList

#: Kinds of values that msgpack does not know. A list that begins with the mark of a kind stands for such a value.
_TUPLE, _SET, _FROZENSET, _INT, _COMPLEX, _TENSOR, _ARRAY = range(7)
_SCALAR, _DTYPE, _OBJECT, _ENUM, _ERROR, _OWN = range(7, 13)
#: Kinds of numpy's types that are sent: booleans, numbers, texts, bytes, times.
_NUMPY_KINDS = frozenset("biufcSUMm")
#: Most bytes of an integer.
_MOST_BYTES = 1 << 12
#: Types of torch by name.
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


#: Containers of this library, with functions that return the arguments of which they are made.
_OWN_KINDS: dict[type, Callable[[Any], Sequence[Any]]] = {
    AddressList: lambda value: (list(value), value.digest),
    SourceList: lambda value: value._columns,
    CrudeSample: lambda value: (dict(value),),
}
_OWN_NUMBERS = {kind: number for number, kind in enumerate(_OWN_KINDS)}


class UnknownClassError(UsageError):
    """A message has an object of a class that this process has not imported, or that is no plain class of data."""


class _Mark(NamedTuple):
    """Mark of a kind, at the beginning of a list."""

    kind: int


_MARKS = [msgpack.ExtType(kind, b"") for kind in range(13)]
_READ_MARKS = [_Mark(kind) for kind in range(13)]


def pack(obj: Any) -> Message:
    """Return the message of an object. Tensor memory is not copied, so it must not change until it has been sent.

    Raises:
        TypeError: a part of the object cannot be sent.
    """
    packer = _Packer()
    structure = msgpack.packb(obj, default=packer.replaced, strict_types=True, unicode_errors="surrogatepass")
    classes = msgpack.packb([[path, *names] for path, names in packer.classes])
    return message_of([memoryview(structure), memoryview(classes), *packer.buffers])


def unpack(memory: memoryview) -> Any:
    """Return the object of a message that is contiguous in ``memory``; its tensors refer to that memory.

    Raises:
        UnknownClassError: see there.
        Exception: the message is damaged.
    """
    structure, classes, *buffers = parts_of(memory)
    table = [(path, tuple(names)) for path, *names in msgpack.unpackb(classes)]
    reader = _Reader(table, buffers)
    return msgpack.unpackb(
        structure,
        ext_hook=lambda kind, _: _READ_MARKS[kind],
        list_hook=reader.restored,
        strict_map_key=False,
        unicode_errors="surrogatepass",
    )


class _Packer:
    """Replacement of values that msgpack does not know by lists.

    Attributes:
        classes: classes of the objects, with the names of the fields that are sent.
        buffers: memory of the tensors and arrays.
    """

    def __init__(self) -> None:
        self.classes: dict[tuple[str, tuple[str, ...]], int] = {}
        self.buffers: list[memoryview] = []

    def replaced(self, value: Any) -> list[Any]:
        """Return the list for a value."""
        kind = type(value)
        if kind is tuple:
            return [_MARKS[_TUPLE], *value]
        if kind is torch.Tensor:
            return self._tensor(value)
        if kind is np.ndarray:
            return self._array(value)
        if dataclasses.is_dataclass(kind):
            return self._object(value)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return [_MARKS[_OBJECT], self._class(kind, kind._fields), *value]
        if kind in _OWN_KINDS:
            return [_MARKS[_OWN], _OWN_NUMBERS[kind], *_OWN_KINDS[kind](value)]
        if isinstance(value, Enum) and value.name in kind.__members__:  # else it is a union of flags
            return [_MARKS[_ENUM], self._class(kind, ()), value.name]
        if isinstance(value, BaseException):
            return self._error(value)
        return _plain(value)

    def _tensor(self, value: torch.Tensor) -> list[Any]:
        if value.device.type != "cpu" or value.layout is not torch.strided or value.is_quantized:
            raise TypeError(f"a tensor on {value.device}, {value.layout}, is not sent to another machine")
        held = value.detach().resolve_conj().resolve_neg().contiguous()
        self.buffers.append(held.reshape(-1).view(torch.uint8).numpy().data)
        return [_MARKS[_TENSOR], str(value.dtype), [*value.shape], len(self.buffers) - 1, value.requires_grad]

    def _array(self, value: np.ndarray) -> list[Any]:
        if value.dtype.kind not in _NUMPY_KINDS:
            raise TypeError(f"an array of {value.dtype} is not sent to another machine")
        held = np.ascontiguousarray(value)
        self.buffers.append(held.reshape(-1).view(np.uint8).data)
        return [_MARKS[_ARRAY], value.dtype.str, [*value.shape], len(self.buffers) - 1]

    def _object(self, value: Any) -> list[Any]:
        kind: Any = type(value)
        slots, own = _slots_of(kind), getattr(value, "__dict__", {})
        fields = [getattr(value, name) for name in slots]
        return [_MARKS[_OBJECT], self._class(kind, (*slots, *own)), *fields, *own.values()]

    def _error(self, error: BaseException) -> list[Any]:
        kind = type(error)
        text = f"{kind.__name__}: {error}"
        # The file of an error of the system is not among its `args`.
        args = [*error.args, error.filename] if isinstance(error, OSError) and error.filename else [*error.args]
        return [_MARKS[_ERROR], self._class(kind, ()), args, {**vars(error)}, text]

    def _class(self, kind: type, names: tuple[str, ...]) -> int:
        """Return the number of a class in the table of the message."""
        return self.classes.setdefault((_path_of(kind), names), len(self.classes))


@lru_cache(maxsize=4096)
def _path_of(kind: Any) -> str:
    path = f"{kind.__module__}:{kind.__qualname__}"
    if "<locals>" in path:
        raise TypeError(f"an object of {kind.__qualname__}, a class that is made inside of a function")
    return path


@lru_cache(maxsize=4096)
def _slots_of(kind: Any) -> tuple[str, ...]:
    """Return the fields of a class that are in slots: all, none, or those of a base class."""
    names = [field.name for field in dataclasses.fields(kind)]
    return tuple(name for name in names if isinstance(getattr(kind, name, None), MemberDescriptorType))


def _plain(value: Any) -> list[Any]:
    """Return the list for a value of Python, or of numpy, without parts of other kinds."""
    kind = type(value)
    if kind is set or kind is frozenset:
        return [_MARKS[_SET if kind is set else _FROZENSET], *sorted(value, key=repr)]  # equal sets have equal bytes
    if kind is int:
        return [_MARKS[_INT], value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]
    if kind is complex:
        return [_MARKS[_COMPLEX], value.real, value.imag]
    if kind is torch.dtype:
        return [_MARKS[_DTYPE], str(value)]
    if isinstance(value, np.generic) and value.dtype.kind in _NUMPY_KINDS:
        return [_MARKS[_SCALAR], value.dtype.str, value.tobytes()]
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__} is not sent to another machine")


@lru_cache(maxsize=256)
def _numpy_type(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"an array of {dtype}")
    return dtype


class _Reader:
    """Restoration of values from the lists that stand for them.

    Args:
        table: paths and names of fields of classes.
        buffers: memory of the tensors and arrays.
    """

    def __init__(self, table: list[tuple[str, tuple[str, ...]]], buffers: list[memoryview]):
        self._table = table
        self._buffers = buffers

    def restored(self, items: list[Any]) -> Any:
        """Return the value of a list: the list itself, unless it begins with a mark."""
        if not items or type(items[0]) is not _Mark:
            return items
        return _RESTORED[items[0].kind](self, items)

    def _tensor(self, items: list[Any]) -> torch.Tensor:
        _, dtype, shape, buffer, requires_grad = items
        memory = self._buffers[buffer]
        made = torch.frombuffer(memory, dtype=_DTYPES[dtype]) if memory.nbytes else torch.empty(0, dtype=_DTYPES[dtype])
        return made.reshape(shape).requires_grad_(requires_grad)

    def _array(self, items: list[Any]) -> np.ndarray:
        _, dtype, shape, buffer = items
        memory = self._buffers[buffer]
        return np.frombuffer(memory if memory.nbytes else bytearray(), dtype=_numpy_type(dtype)).reshape(shape)

    def _object(self, items: list[Any]) -> Any:
        return _maker(*self._table[items[1]])(items[2:])

    def _enum(self, items: list[Any]) -> Any:
        kind = known_class(self._table[items[1]][0])
        if not issubclass(kind, Enum):
            raise UnknownClassError(f"{kind} is no enumeration")
        return kind[items[2]]

    def _error(self, items: list[Any]) -> BaseException:
        _, number, args, state, text = items
        try:
            kind = known_class(self._table[number][0])
            if not issubclass(kind, BaseException):
                raise UnknownClassError(f"{kind} is no error")
            error: BaseException = kind.__new__(kind, *args)
            error.args = error.args or tuple(args)
            error.__dict__.update(state)
            return error
        except UnknownClassError:
            return FatalSampleError(f"a worker failed with {text}")


@lru_cache(maxsize=4096)
def _maker(path: str, names: tuple[str, ...]) -> Callable[[list[Any]], Any]:
    """Return the function that makes an object of a class from the values of its fields.

    Raises:
        UnknownClassError: there is no such class of data.
    """
    kind = known_class(path)
    if issubclass(kind, tuple):
        return partial(tuple.__new__, kind)
    if not dataclasses.is_dataclass(kind):
        raise UnknownClassError(f"{path} is no dataclass")
    new = partial(object.__new__, kind)
    slots = _slots_of(kind)
    if names[: len(slots)] != slots:
        raise UnknownClassError(f"{path} has other fields here: {listed(slots)}")
    setters, own = [getattr(kind, name).__set__ for name in slots], names[len(slots) :]

    def made(values: list[Any]) -> Any:
        one = new()
        for put, value in zip(setters, values[: len(setters)], strict=True):
            put(one, value)
        if own:
            one.__dict__.update(zip(own, values[len(setters) :], strict=True))
        return one

    return made


#: Functions that restore the values of each kind.
_RESTORED: list[Callable[[_Reader, list[Any]], Any]] = [
    lambda _, items: tuple(items[1:]),
    lambda _, items: set(items[1:]),
    lambda _, items: frozenset(items[1:]),
    lambda _, items: int.from_bytes(items[1][:_MOST_BYTES], "little", signed=True),
    lambda _, items: complex(items[1], items[2]),
    _Reader._tensor,
    _Reader._array,
    lambda _, items: np.frombuffer(items[2], dtype=_numpy_type(items[1]))[0],
    lambda _, items: _DTYPES[items[1]],
    _Reader._object,
    _Reader._enum,
    _Reader._error,
    lambda _, items: [*_OWN_KINDS][items[1]](*items[2:]),
]


@lru_cache(maxsize=4096)
def known_class(path: str) -> type:
    """Return a class of data by ``module:name``. Nothing is imported for it. The classes of a script are in
    ``__main__`` where it runs, and in its module elsewhere.

    Raises:
        UnknownClassError: there is none.
    """
    module_name, _, name = path.partition(":")
    for module in _modules(module_name):
        found: Any = module
        for step in name.split("."):
            found = vars(found).get(step) if hasattr(found, "__dict__") else None
        if isinstance(found, type) and _is_data(found):
            return found
    raise UnknownClassError(
        f"{path}, which a worker sent, is no class of data that this process has imported",
        fix="import its module in the training script; batches from elsewhere consist of tensors, arrays, texts, "
        "numbers, and dataclasses",
    )


def _is_data(kind: type) -> bool:
    is_named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return is_named or dataclasses.is_dataclass(kind) or issubclass(kind, (Enum, BaseException))


def _modules(name: str) -> list[Any]:
    main = sys.modules.get("__main__")
    if name == "__main__":
        return [main, *(sys.modules[script] for script in SCRIPTS if script in sys.modules)]
    named = sys.modules.get(name)
    file = getattr(main, "__file__", None) or ""
    is_script = file.replace("\\", "/").rpartition("/")[2].removesuffix(".py") == name.rpartition(".")[2]
    return [module for module in (named, main if is_script else None) if module is not None]


#: Names of the modules that are ``__main__`` in the trainer; set where jobs of a trainer are run.
SCRIPTS: list[str] = []
