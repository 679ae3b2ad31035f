"""Decoders of the column encodings in MDS shards, as MosaicML's ``streaming`` documents and writes them.

Columns that hold a file (``jpeg``, ``png``, ``pkl``) stay bytes, so that they are decoded, or refused, by the extension
of their part. All others become the values that ``streaming`` gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np

#: Encodings that hold a file, with its extension.
EXTENSIONS = {"jpeg": "jpg", "png": "png", "pkl": "pkl"}
_SCALARS = frozenset(["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"])
_SCALARS |= {"float16", "float32", "float64"}
#: Codes of array types: number of bits, plus 1 for signed integers, plus 2 for floats.
_CODES = {"uint8": 8, "int8": 9, "uint16": 16, "int16": 17, "float16": 18, "uint32": 32, "int32": 33, "float32": 34}
_CODES |= {"uint64": 64, "int64": 65, "float64": 66}
_NAMES = {code: name for name, code in _CODES.items()}
#: Types of the numbers of a shape, by the width code in the head.
_SHAPES = ("<u1", "<u2", "<u4", "<u8")


def decoder_of(encoding: str) -> Callable[[bytes], Any] | None:
    """Return the decoder of a column's bytes; None: the encoding is unknown.

    Example:
        >>> decoder_of("ndarray:int16:2")(b"\\x07\\x00\\x08\\x00")
        array([7, 8], dtype=int16)
    """
    name, _, details = encoding.partition(":")
    if name == "ndarray":
        dtype, _, shape = details.partition(":")
        if dtype and dtype not in _CODES:
            return None
        return partial(_array, dtype, tuple(map(int, shape.split(","))) if shape else None)
    return None if details else _DECODERS.get(name)


def fixed_size(encoding: str) -> int | None:
    """Return the bytes of each value of an encoding; None: the size varies."""
    name, _, details = encoding.partition(":")
    if name == "ndarray" and ":" in details:
        dtype, _, shape = details.partition(":")
        return int(np.prod([int(axis) for axis in shape.split(",")])) * np.dtype(dtype).itemsize
    return 8 if name == "int" else np.dtype(name).itemsize if name in _SCALARS else None


def ndarray_bytes(array: Any) -> bytes | None:
    """Encode an array as ``ndarray``; None: the encoding does not support it (other types, empty, scalar)."""
    code = _CODES.get(array.dtype.name)
    if code is None or not array.ndim or not array.size or array.ndim > 63:
        return None
    width = next(number for number, most in enumerate((8, 16, 32, 64)) if max(array.shape) < 1 << most)
    head = bytes([code, array.ndim << 2 | width])
    values = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return head + np.array(array.shape, _SHAPES[width]).tobytes() + values.tobytes()


def _array(dtype: str, shape: tuple[int, ...] | None, data: bytes) -> Any:
    at = 0
    if not dtype:
        dtype, at = _NAMES[data[0]], 1
    if shape is None:
        axes, width = data[at] >> 2, data[at] & 3
        shape = tuple(np.frombuffer(data, _SHAPES[width], axes, at + 1).tolist())
        at += 1 + (axes << width)
    kind = np.dtype(dtype).newbyteorder("<")
    return np.frombuffer(bytearray(data[at:]), kind).reshape(shape)


def _scalar(dtype: str, data: bytes) -> Any:
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))[0]


def _image(data: bytes) -> Any:
    from PIL import Image

    width, height, length = np.frombuffer(data, "<u4", 3).tolist()
    return Image.frombytes(data[12 : 12 + length].decode(), (width, height), data[12 + length :])


def _list(decode: Callable[[bytes], Any], head: int, data: bytes) -> list[Any]:
    """Decode values that follow their number and sizes; ``head`` is the number of bytes before these."""
    (count,) = np.frombuffer(data, "<u4", 1, head).tolist()
    at = head + 4 + 4 * count
    values = []
    for size in np.frombuffer(data, "<u4", count, head + 4).tolist():
        if at + size > len(data):
            raise ValueError("a list is longer than its bytes")
        values.append(decode(data[at : at + size]))
        at += size
    return values


def _integer(data: bytes) -> int:
    return int(np.frombuffer(data, "<i8")[0])


def _number(kind: Callable[[str], Any], data: bytes) -> Any:
    return kind(data.decode())


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **{name: partial(_scalar, name) for name in sorted(_SCALARS)},
    **dict.fromkeys(("bytes", "jpeg", "png", "pkl"), bytes),
    "str": bytes.decode,
    "int": _integer,
    "str_int": partial(_number, int),
    "str_float": partial(_number, float),
    "str_decimal": partial(_number, Decimal),
    "json": json.loads,
    "pil": _image,
    "list[pil]": partial(_list, _image, 4),
    "list[jpeg]": partial(_list, bytes, 4),
    "list[png]": partial(_list, bytes, 4),
    "jpeg_array": partial(_list, bytes, 0),
    "jpegarray": partial(_list, bytes, 0),
}
