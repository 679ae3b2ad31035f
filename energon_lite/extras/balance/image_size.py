"""Size of an image from the first bytes of its file, for JPEG, PNG, WebP, GIF and BMP."""

from __future__ import annotations

import struct
from collections.abc import Callable

from energon_lite.errors import DecodeError

__all__ = ["IMAGE_HEAD_BYTES", "image_size"]

#: Bytes that suffice for nearly all images; a JPEG may have a thumbnail and a color profile before its size.
IMAGE_HEAD_BYTES = 1024
#: Bytes of each further read.
_MORE = 256
#: Markers and fill bytes that are skipped before the size of a JPEG, at most.
_MOST_MARKERS = 1 << 12

#: Markers of JPEG segments that begin a frame.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
#: Markers without a length.
_ALONE = frozenset([0x01, *range(0xD0, 0xD8)])
#: Marker of the end of the image.
_END = 0xD9
#: Marker of the compressed data.
_SCAN = 0xDA

#: Type of the first chunk, width, height.
_PNG = struct.Struct(">8x4x4sII")
#: Width, height.
_GIF = struct.Struct("<6xHH")
#: Width, height of a bitmap.
_BMP = struct.Struct("<18xii")
#: Width, height of a bitmap with the header of OS/2.
_OLD_BMP = struct.Struct("<18xHH")
#: Length of a JPEG segment.
_LENGTH = struct.Struct(">H")
#: Height, width of a JPEG frame.
_FRAME = struct.Struct(">3xHH")

#: ``(offset, size) -> bytes``; fewer at the end of the file.
Read = Callable[[int, int], bytes]


def image_size(head: bytes, read: Read | None = None) -> tuple[int, int] | None:
    """Return height and width of an image as stored, in pixels; the orientation in EXIF data is ignored.

    Args:
        head: the first :data:`IMAGE_HEAD_BYTES` bytes of the file, or all of it.
        read: reads further bytes, which some JPEGs need; None: ``head`` is the whole file.

    Returns:
        ``(height, width)``; None: the file has none of the supported formats.

    Raises:
        DecodeError: the file has one of these formats, but is damaged.

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
                raise _damaged("its first chunk is not a header")
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
    place, base = 2, 0  # offset of the next marker, and offset of ``head`` in the file
    for _ in range(_MOST_MARKERS):
        # 9 bytes: a segment's marker, its length, and the beginning of a frame's header.
        if place - base + 9 > len(head) and read is not None:
            head, base = read(place, _MORE), place
        at = place - base
        if head[at] != 0xFF:
            raise _damaged(f"there is no marker at byte {place}")
        marker = head[at + 1]
        if marker == 0xFF:  # fill byte
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
    raise _damaged("its first chunk is not a picture")


def _checked(size: tuple[int, int]) -> tuple[int, int]:
    if min(size) < 1:
        raise _damaged(f"its size is {size[1]} x {size[0]}")
    return size


def _damaged(how: str) -> DecodeError:
    return DecodeError(f"the picture is damaged: {how}", fix="repair or remove it")
