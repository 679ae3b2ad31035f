"""Columns of the images of samples, ``--images`` and ``--patches``: their sizes, from the headers of their files.

The index has the places of the images, so those of a whole chunk of samples are looked up at once. A kilobyte of each
is read, more only if a JPEG needs it. Formats whose size is not at their beginning are read by Pillow.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np

from energon_lite.errors import DecodeError, UsageError, listed
from energon_lite.extras.balance.entry_points import COLUMNS
from energon_lite.extras.balance.image_patches import ImagePatches
from energon_lite.extras.balance.image_size import IMAGE_HEAD_BYTES, image_size
from energon_lite.loading.measuring.values import Values
from energon_lite.storage.files.shard_store import Shard
from energon_lite.storage.index.column_file import Ragged
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.samples.content import guess_extension, media_kind
from energon_lite.storage.samples.image_decoding import read_image_header

__all__ = ["ImageColumns", "ImageHeaders", "requested"]


def requested(asked: Mapping[str, object]) -> ImageColumns:
    """Return the columns that the options ``images`` and ``patches`` request.

    Raises:
        UsageError: ``patches`` has a wrong form.
    """
    text = asked["patches"]
    if not isinstance(text, str):
        return ImageColumns()
    fix = 'write it like --patches \'{"patch_size": 14, "multiple": 28}\', in single quotes; or --patches 14'
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--patches is not JSON: {error}", fix=fix) from None
    value = {"patch_size": value} if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(value, dict) or any(type(number) is not int for number in value.values()):
        raise UsageError("--patches is no JSON object of whole numbers", fix=fix)
    try:
        return ImageColumns(ImagePatches(**value))
    except TypeError as error:
        raise UsageError(f"--patches: {error}", fix=fix) from None


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
                "no sample has a part that is an image, by its name",
                where=source.path,
                fix=f"the parts are: {listed(sorted(names), 20)}; of images that are inside of parts, or elsewhere, a "
                "task encoder tells the sizes: sample_costs",
            )

    def add(self, first: int, stop: int, values: Values, broken: dict[int, Exception]) -> None:
        """See :class:`~energon_lite.loading.measuring.part_columns.ColumnReader`."""
        sizes = self.sizes(first, stop, broken)
        values.columns["images"] = sizes.counts
        values.ragged["image_sizes"] = sizes
        if self._patches is None:
            return
        patches = self._patches(sizes.values)
        owner = np.repeat(np.arange(stop - first), sizes.counts)
        for name, numbers in (("patches", patches), ("squared_patches", patches**2)):
            values.columns[name] = np.zeros(stop - first, dtype=np.int64)
            np.add.at(values.columns[name], owner, numbers)
        values.ragged["image_patches"] = Ragged(sizes.counts, patches[:, None])

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
            raise DecodeError("the part is no image that is known", fix="repair or remove it")
        header = read_image_header(io.BytesIO(data))
        return header.height, header.width
