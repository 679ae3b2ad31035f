"""Detection of a file's type by its first bytes. Extensions are those of the package ``filetype``, as in Energon."""

from __future__ import annotations

#: Bytes that :func:`guess_extension` examines.
HEAD_BYTES = 262

#: Offset of the magic bytes, the bytes, and the extension.
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\xff\xd8\xff", "jpg"),
    (0, b"\x89PNG", "png"),
    (0, b"GIF", "gif"),
    (8, b"WEBP", "webp"),
    (0, b"II*\0", "tif"),
    (0, b"MM\0*", "tif"),
    (0, b"\0\0\1\0", "ico"),
    (0, b"\0\0\0\x0cjP  \r\n\x87\n", "jpx"),
    (0, b"FLV\1", "flv"),
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"ID3", "mp3"),
    (0, b"\xff\xfb", "mp3"),
    (0, b"\xff\xf3", "mp3"),
    (0, b"\xff\xf2", "mp3"),
    (0, b"\xff\xf1", "aac"),
    (0, b"\xff\xf9", "aac"),
)
#: Extension of a RIFF file by its form type.
_RIFF = {b"AVI ": "avi", b"WAVE": "wav"}
#: Major brands of ISO files other than ``mp4``.
_BRANDS = {b"qt  ": "mov", b"M4V ": "m4v", b"M4A ": "m4a"}
_MP4_BRANDS = (b"mp4", b"iso", b"avc1", b"dash", b"mmp4", b"MSNV", b"F4V ", b"ndx", b"3gp", b"NDS")
#: Sizes of a bitmap's header, in bytes; they are checked because many texts begin with the letters BM.
_BITMAP_HEADERS = frozenset([12, 16, 40, 52, 56, 64, 108, 124])

_IMAGES = frozenset("bmp gif ico j2k jp2 jpx jpeg jpg png tif tiff webp".split())  # noqa: SIM905
_AV = frozenset("aac avi flac flv m4a m4v mkv mov mp3 mp4 ogg wav webm".split())  # noqa: SIM905


def guess_extension(head: bytes) -> str | None:
    """Guess the extension of an image, audio or video file; None: the type is unknown.

    Args:
        head: the first :data:`HEAD_BYTES` bytes, or more.

    Example:
        >>> guess_extension(b"RIFF" + bytes(4) + b"WAVEfmt ")
        'wav'
    """
    head = bytes(head[:HEAD_BYTES])
    for place, magic, extension in _MAGIC:
        if head.startswith(magic, place):
            return extension
    if head.startswith(b"RIFF"):
        return _RIFF.get(head[8:12])
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        return _BRANDS.get(brand) or ("mp4" if brand.startswith(_MP4_BRANDS) else None)
    if head.startswith(b"\x1aE\xdf\xa3"):
        return "webm" if b"webm" in head else "mkv" if b"matroska" in head else None
    if head.startswith(b"BM") and int.from_bytes(head[14:18], "little") in _BITMAP_HEADERS:
        return "bmp"
    return None


def media_kind(extension: str | None) -> str | None:
    """Return ``"image"`` or ``"av"`` for an extension without dot, in upper or lower case; None: neither."""
    lower = (extension or "").lower()
    return "image" if lower in _IMAGES else "av" if lower in _AV else None
