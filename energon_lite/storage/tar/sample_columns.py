"""Which members of a shard make a sample, found for thousands of members at once.

The rule is WebDataset's as Energon applies it: a member's key is its path up to the first dot of the last component,
the rest is the part name; neighbours with equal keys are one sample; members whose path begins with a ``__name__``
component, and members without a part name, belong to no sample.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from energon_lite.storage.tar.member_columns import Bytes2D, Int64, MemberColumns, padded_width

__all__ = ["SampleColumns", "split_member_name"]

#: Part names that are looked up in one step each. A shard with more of them is looked up member by member.
_USUAL_PART_NAMES = 32


def split_member_name(name: str) -> tuple[str, str] | None:
    """Split the name of a tar member into (key, part name); None if it belongs to no sample.

    Example:
        >>> split_member_name("a.b/0001.seg.png")
        ('a.b/0001', 'seg.png')
        >>> split_member_name("__meta__/x.txt") is None
        True
    """
    if name.startswith("__"):
        top = name.partition("/")[0]
        if len(top) >= 4 and top.endswith("__"):
            return None
    start = name.rfind("/") + 1
    dot = name.find(".", start)
    if dot < 0:
        return None
    if dot == start:  # a hidden file: Energon takes the folder, slash included, as its key if that has no dot
        folder = name[:start]
        above = folder[:-1].rfind("/") + 1
        if not folder or "." in folder[above:]:
            return None
    return name[:dot], name[dot + 1 :]


class SampleColumns:
    """Collect the members of a shard, in order, into samples. The arrays are those of ``ShardScan``."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._last_key: bytes | None = None
        self._rows = 0
        self._headers: list[Int64] = []
        self._first_part: list[Int64] = []
        self._parts: list[Int64] = []
        self._key_lengths: list[Int64] = []
        self._keys: list[bytes] = []

    def add(self, members: MemberColumns) -> None:
        """Take the members that follow."""
        dots = _dots(members)
        kept = np.flatnonzero(dots >= 0)
        if not len(kept):
            return
        names, lengths, dots = members.names[kept], members.lengths[kept], dots[kept]
        in_key = np.arange(names.shape[1]) < dots[:, None]
        keys = names * in_key
        words = keys.view(np.uint64)
        first = np.empty(len(kept), dtype=bool)
        first[0] = self._last_key != keys[0, : dots[0]].tobytes()
        first[1:] = (words[1:] != words[:-1]).any(1) | (dots[1:] != dots[:-1])
        self._last_key = keys[-1, : dots[-1]].tobytes()
        self._headers.append(members.headers[kept][first])
        self._first_part.append(np.flatnonzero(first) + self._rows)
        self._key_lengths.append(dots[first])
        self._keys.append(names[first][in_key[first]].tobytes())
        numbers = self._part_numbers(names, dots + 1, lengths)
        self._parts.append(np.stack([members.offsets[kept], members.sizes[kept], numbers], 1))
        self._rows += len(kept)

    def _part_numbers(self, names: Bytes2D, starts: Int64, stops: Int64) -> Int64:
        """Number of each name's bytes from start to stop, counted in the order in which they are first seen."""
        lengths = stops - starts
        width = padded_width(int(lengths.max()))
        column = np.arange(width)
        places = np.minimum(starts[:, None] + column, names.shape[1] - 1)
        texts = np.take_along_axis(names, places, 1) * (column < lengths[:, None])
        words = texts.view(np.uint64)
        numbers = np.empty(len(names), dtype=np.int64)
        left = np.arange(len(names))
        for _ in range(_USUAL_PART_NAMES):
            if not len(left):
                return numbers
            row = left[0]
            same = (words[left] == words[row]).all(1) & (lengths[left] == lengths[row])
            numbers[left[same]] = self._number(texts[row, : lengths[row]].tobytes())
            left = left[~same]
        numbers[left] = [self._number(texts[row, : lengths[row]].tobytes()) for row in left]
        return numbers

    def _number(self, text: bytes) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def headers(self) -> Int64:
        """``[samples]``, byte at which each sample's first header starts."""
        return _joined(self._headers)

    def first_part(self) -> Int64:
        """``[samples + 1]``, row of each sample's first part."""
        return _joined([*self._first_part, np.array([self._rows], dtype=np.int64)])

    def parts(self) -> Int64:
        """``[parts, 3]``: payload offset, payload size, number of the part's name."""
        return _joined([np.zeros((0, 3), dtype=np.int64), *self._parts])

    def part_names(self) -> tuple[str, ...]:
        """The names those numbers stand for."""
        return tuple(text.decode("utf-8", "surrogateescape") for text in self._numbers)

    def key_offsets(self) -> Int64:
        """``[samples + 1]``, where each key starts in :meth:`keys`."""
        return np.cumsum(_joined([np.zeros(1, dtype=np.int64), *self._key_lengths]))

    def keys(self) -> bytes:
        """All keys in UTF-8, without separator."""
        return b"".join(self._keys)


def _joined(arrays: list[Int64]) -> Int64:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)


def _dots(members: MemberColumns) -> Int64:
    """Where in each name the key ends; -1 for members that belong to no sample (:func:`split_member_name`)."""
    names = members.names
    dots, slashes = names == ord("."), names == ord("/")
    start: Int64 = np.zeros(len(names), dtype=np.int64)
    if slashes.any():
        start = np.where(slashes.any(1), names.shape[1] - slashes[:, ::-1].argmax(1), 0)
        dots &= np.arange(names.shape[1]) >= start[:, None]
    dot: NDArray[np.int64] = dots.argmax(1)
    found = dots[np.arange(len(dots)), dot]
    hidden, reserved = dot == start, (names[:, 0] == ord("_")) & (names[:, 1] == ord("_"))
    for row in np.flatnonzero(found & (hidden | reserved)).tolist():
        found[row] = split_member_name(members.name(row)) is not None
    return np.where(found, dot, -1)
