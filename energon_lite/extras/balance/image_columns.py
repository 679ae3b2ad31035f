"""Columns of the images of samples, ``--images`` and ``--patches``: their sizes, from the headers of their files.

The index has the places of the images, so those of a whole chunk of samples are looked up at once. A kilobyte of each
is read, more only if a JPEG needs it. Formats whose size is not at their beginning are read by Pillow.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from energon_lite.batching.capacity import Ints
from energon_lite.documents import from_plain, parse_yaml, read
from energon_lite.errors import DecodeError, UsageError, at_least_one, listed
from energon_lite.extras.balance import COLUMNS
from energon_lite.loading.measuring_runner import Values
from energon_lite.storage.files.shard_store import Shard
from energon_lite.storage.index.column_file import Ragged
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.samples.image_decoding import read_image_header
from energon_lite.storage.samples.part_decoder import guess_extension, media_kind

#: Bytes that suffice for nearly all images; a JPEG may have a thumbnail and a color profile before its size.
IMAGE_HEAD_BYTES = 1024
#: Most bytes of each further read.
_MORE = 256
#: Most markers and fill bytes that are skipped before the size of a JPEG.
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


@dataclass(frozen=True)
class ImagePatches:
    """Function from image sizes to numbers of patches, after the encoder's preprocessing.

    Args:
        patch_size: height and width of a patch, in pixels.
        image_size: each image is scaled to a square of this width in pixels; None: images keep their sizes.
        multiple: height and width are rounded to the nearest positive multiple of this number, as Qwen2-VL does with
            twice its patch size; None: incomplete patches at the edges are cut off.
        min_pixels, max_pixels: images of fewer or more pixels are scaled in proportion; None: no scaling.
            With ``multiple``, scaled sides are rounded up for the first, down for the second.

    Example:
        >>> ImagePatches(14, image_size=336)([[480, 640]]).tolist()
        [576]
        >>> ImagePatches(14, multiple=28, max_pixels=401_408)([[480, 640], [1080, 1920], [20, 30]]).tolist()
        [1564, 1976, 4]
    """

    patch_size: int
    image_size: int | None = None
    multiple: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        at_least_one(patch_size=self.patch_size, image_size=self.image_size, multiple=self.multiple)
        at_least_one(min_pixels=self.min_pixels, max_pixels=self.max_pixels)
        if self.multiple is not None and self.multiple % self.patch_size:
            raise UsageError(
                f"multiple={self.multiple} is not a multiple of patches of {self.patch_size}",
                fix=f"give e.g. {2 * self.patch_size}",
            )
        scaled = (self.multiple, self.min_pixels, self.max_pixels) != (None, None, None)
        if self.image_size is not None and scaled:
            raise UsageError("image_size cannot be combined with other sizes", fix="leave out multiple and pixels")

    def __call__(self, sizes: Any) -> Ints:
        """Number of patches of each image.

        Args:
            sizes: height and width in pixels, ``[images, 2]``.

        Returns:
            int64 ``[images]``.
        """
        sizes = np.asarray(sizes, dtype=np.int64).reshape(-1, 2)
        if self.image_size is not None:
            return np.full(len(sizes), (self.image_size // self.patch_size) ** 2, dtype=np.int64)
        patches: Ints = (self._scaled(sizes) // self.patch_size).prod(axis=1)
        return patches

    def _scaled(self, sizes: Ints) -> Ints:
        multiple = self.multiple or 1
        scaled = np.maximum(np.rint(sizes / multiple).astype(np.int64), 1) * multiple
        pixels, given = scaled.prod(axis=1), sizes.prod(axis=1)
        for limit, wrong, rounded in (
            (self.max_pixels, pixels > (self.max_pixels or 0), np.floor),
            (self.min_pixels, pixels < (self.min_pixels or 0), np.ceil),
        ):
            if limit is not None:
                scale = np.sqrt(limit / np.maximum(given[wrong], 1))[:, None]
                scaled[wrong] = np.maximum(rounded(sizes[wrong] * scale / multiple).astype(np.int64), 1) * multiple
        return scaled


def requested(asked: Mapping[str, object]) -> ImageColumns:
    """Return the columns that the options ``images`` and ``patches`` request.

    Raises:
        ConfigError: ``patches`` has a wrong form.
    """
    text = asked["patches"]
    if not isinstance(text, str):
        return ImageColumns()
    rule = parse_yaml(text, "--patches")
    if isinstance(rule.value, int):
        rule = from_plain({"patch_size": rule.value}, "--patches")
    return ImageColumns(read(rule, ImagePatches))


@dataclass(frozen=True)
class ImageColumns:
    """Request of the columns ``images`` and ``image_sizes``.

    Args:
        patches: number of patches of an image, for the columns ``image_patches``, ``patches`` and ``squared_patches``;
            None: these are not made.
    """

    patches: ImagePatches | None = None
    names: ClassVar[tuple[str, ...]] = COLUMNS["images"].names

    @property
    def settings(self) -> dict[str, object]:
        """The rule for patches as plain data."""
        return {"images": None if self.patches is None else asdict(self.patches)}

    def open(self, source: WebdatasetSource) -> ImageHeaders:
        """Return the reader of a data set.

        Raises:
            UsageError: no sample has a part that is an image.
        """
        return ImageHeaders(source, self.patches)


class ImageHeaders:
    """Reader of the columns of the images of neighbouring samples.

    Args:
        source: the whole data set. Parts with an image's name ending, such as ``jpg`` or ``2.png``, are images, in the
            order of the tar file.
        patches: number of patches of an image; None: there are no columns of patches.

    Raises:
        UsageError: no sample has such a part.
    """

    def __init__(self, source: WebdatasetSource, patches: ImagePatches | None = None):
        self._source = source
        self._patches = patches
        names = source.index.part_names
        is_image = [media_kind(name.rpartition(".")[2]) == "image" for name in names]
        self._parts = np.flatnonzero(is_image)
        if not len(self._parts):
            raise UsageError(
                "no sample has a part with an image's extension",
                where=source.path,
                fix=f"the parts are: {listed(sorted(names), 20)}; of images that are inside of parts, or elsewhere, a "
                "task encoder tells the sizes: sample_costs",
            )

    def add(self, first: int, stop: int, values: Values, broken: dict[int, Exception]) -> None:
        """See :class:`~energon_lite.loading.measuring_runner.ColumnReader`."""
        sizes = self.sizes(first, stop, broken)
        values.columns["images"] = sizes.counts
        values.columns["image_sizes"] = sizes
        if self._patches is None:
            return
        patches = self._patches(sizes.values)
        owner = np.repeat(np.arange(stop - first), sizes.counts)
        for name, numbers in (("patches", patches), ("squared_patches", patches**2)):
            values.columns[name] = column = np.zeros(stop - first, dtype=np.int64)
            np.add.at(column, owner, numbers)
        values.columns["image_patches"] = Ragged(sizes.counts, patches[:, None])

    def sizes(self, first: int, stop: int, broken: dict[int, Exception]) -> Ragged:
        """Return height and width of each image of samples ``first`` to ``stop - 1``, in one shard: int64 ``[n, 2]``.

        Args:
            broken: filled with the error of each image without a size, by its sample's place. The image is left out.
        """
        index = self._source.index
        rows = index.samples[first : stop + 1][:, 0]
        parts = index.parts[rows[0] : rows[-1]]
        chosen = np.isin(parts[:, 2], self._parts)
        owners = np.repeat(np.arange(stop - first), np.diff(rows))[chosen]
        shard = self._source.choice.shards[self._source.locate(first)[0]]
        offsets = parts[chosen, 0].tolist()
        lengths = parts[chosen, 1].tolist()
        ranges = [
            (shard, offset, min(length, IMAGE_HEAD_BYTES)) for offset, length in zip(offsets, lengths, strict=True)
        ]
        heads = self._source.store.fetch(ranges)
        sizes = np.zeros((len(heads), 2), dtype=np.int64)
        for place, (head, offset, length) in enumerate(zip(heads, offsets, lengths, strict=True)):
            try:
                sizes[place] = self._size(head, shard, offset, length)
            except DecodeError as error:
                broken.setdefault(int(owners[place]), error)
        there = sizes[:, 0] > 0
        return Ragged(np.bincount(owners[there], minlength=stop - first), sizes[there])

    def _size(self, head: bytes, shard: Shard, offset: int, length: int) -> tuple[int, int]:
        fetch = self._source.store.fetch

        def read(start: int, size: int) -> bytes:
            size = max(0, min(size, length - start))
            return fetch([(shard, offset + start, size)])[0] if size else b""

        header_size = image_size(head, read)
        if header_size is not None:
            return header_size
        data = head if len(head) == length else read(0, length)
        if media_kind(guess_extension(data)) != "image":
            raise DecodeError("the part is not an image of a known format", fix="repair or remove it")
        header = read_image_header(io.BytesIO(data))
        return header.height, header.width
