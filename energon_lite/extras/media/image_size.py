"""How large a picture is, by the first bytes of its file: JPEG, PNG, WebP, GIF and BMP say it there."""

from __future__ import annotations

import struct
from collections.abc import Callable

from energon_lite.errors import DecodeError

__all__ = ["IMAGE_HEAD_BYTES", "image_size"]

#: Bytes that are enough for nearly all pictures; a JPEG may have its thumbnail and its color profile before its size.
IMAGE_HEAD_BYTES = 1024
#: Bytes that are read together behind these.
_MORE = 256
#: Markers, and bytes of filling, that a JPEG may have before its size.
_MOST_MARKERS = 1 << 12

#: Segments of a JPEG that begin a frame, and markers without a length.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE = frozenset([0x01, *range(0xD0, 0xD8)])
_END, _SCAN = 0xD9, 0xDA

_PNG, _GIF = struct.Struct(">8x4x4sII"), struct.Struct("<6xHH")
_BMP, _OLD_BMP = struct.Struct("<18xii"), struct.Struct("<18xHH")
_LENGTH, _FRAME = struct.Struct(">H"), struct.Struct(">3xHH")

#: Reads bytes of the file: offset and size; fewer at its end.
Read = Callable[[int, int], bytes]


def image_size(head: bytes, read: Read | None = None) -> tuple[int, int] | None:
    """Height and width of a picture as it is stored, in pixels, whatever its EXIF data says of its orientation.

    Args:
        head: the first :data:`IMAGE_HEAD_BYTES` bytes of the file, or all of it.
        read: reads more, which some JPEGs need; None: ``head`` is all there is.

    Returns:
        ``(height, width)``; None: the file is none of the formats whose first bytes say it.

    Raises:
        DecodeError: the file is one of these formats, and damaged.

    Example:
        >>> image_size(b"GIF89a" + bytes([64, 0, 48, 0]))
        (48, 64)
    """
    try:
        if head.startswith(b"\xff\xd8"):
            return _checked(_of_jpeg(head, read))
        if head.startswith(b"\x89PNG\r\n\x1a\n"):
            kind, width, height = _PNG.unpack_from(head)
            if kind != b"IHDR":
                raise _damaged("its first chunk is no header")
            return _checked((height, width))
        if head.startswith((b"GIF87a", b"GIF89a")):
            width, height = _GIF.unpack_from(head)
            return _checked((height, width))
        if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
            return _checked(_of_webp(head))
        if head.startswith(b"BM") and len(head) >= 26:
            width, height = (_OLD_BMP if head[14] == 12 else _BMP).unpack_from(head)
            return _checked((abs(height), width))
    except (struct.error, IndexError):
        raise _damaged("it ends in its header") from None
    return None


def _of_jpeg(head: bytes, read: Read | None) -> tuple[int, int]:
    place, base = 2, 0  # of the next marker, and of ``head`` in the file
    for _ in range(_MOST_MARKERS):
        # A segment's marker, its length, and what a frame's header begins with.
        if place - base + 9 > len(head) and read is not None:
            head, base = read(place, _MORE), place
        at = place - base
        if head[at] != 0xFF:
            raise _damaged(f"there is no marker at byte {place}")
        marker = head[at + 1]
        if marker == 0xFF:  # filling
            place += 1
        elif marker in _ALONE:
            place += 2
        elif marker in _FRAMES:
            height, width = _FRAME.unpack_from(head, at + 2)
            return height, width
        elif marker in (_END, _SCAN):
            raise _damaged("it has no frame")
        else:
            place += 2 + _LENGTH.unpack_from(head, at + 2)[0]
    raise _damaged("it has no frame")


def _of_webp(head: bytes) -> tuple[int, int]:
    kind = head[12:16]
    if len(head) < 30:
        raise IndexError
    if kind == b"VP8X":
        return 1 + int.from_bytes(head[27:30], "little"), 1 + int.from_bytes(head[24:27], "little")
    if kind == b"VP8L" and head[20] == 0x2F:
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
    if kind == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        return int.from_bytes(head[28:30], "little") & 0x3FFF, int.from_bytes(head[26:28], "little") & 0x3FFF
    raise _damaged("its first chunk is no picture")


def _checked(size: tuple[int, int]) -> tuple[int, int]:
    if min(size) < 1:
        raise _damaged(f"its size is {size[1]} x {size[0]}")
    return size


def _damaged(how: str) -> DecodeError:
    return DecodeError(f"the picture is damaged: {how}", fix="repair or remove it")
