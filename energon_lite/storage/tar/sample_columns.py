"""Grouping of a shard's members into samples, for thousands of members at once.

The rule is WebDataset's as Energon applies it. A member's key is its path up to the first dot of the last component,
the rest is the part name. Neighbours with equal keys are one sample. Members whose path begins with a ``__name__``
component, and members without a part name, belong to no sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.storage.tar.members import Bytes2D, Int64, MemberColumns

__all__ = ["SampleColumns", "split_member_name"]


def split_member_name(name: str) -> tuple[str, str] | None:
    """Split the name of a tar member into (key, part name); None if it belongs to no sample.

    Example:
        >>> split_member_name("a.b/0001.seg.png")
        ('a.b/0001', 'seg.png')
        >>> split_member_name("__meta__/x.txt") is None
        True
    """
    top, (folder, slash, file) = name.partition("/")[0], name.rpartition("/")
    key, dot, part = file.partition(".")
    is_reserved = len(top) >= 4 and top.startswith("__") and top.endswith("__")
    # A hidden file: as in Energon, its key is the folder with the slash, unless the folder's name has a dot.
    is_lost = not key and (not slash or "." in folder.rpartition("/")[2])
    return None if not dot or is_reserved or is_lost else (folder + slash + key, part)


class SampleColumns:
    """Collector of the members of a shard, in order, into samples."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._last_key: bytes | None = None
        self._keys: list[bytes] = []
        nothing = np.zeros(0, dtype=np.int64)
        #: For each run: headers, first parts and key lengths of its samples, and its parts.
        self._runs = [(nothing, nothing, nothing, nothing.reshape(0, 3))]
        self._rows = 0

    def add(self, members: MemberColumns) -> None:
        """Add the next members of the shard."""
        dots = _dots(members)
        kept = np.flatnonzero(dots >= 0)
        if not len(kept):
            return
        names = members.names[kept]
        lengths = members.lengths[kept]
        dots = dots[kept]
        in_key = np.arange(names.shape[1]) < dots[:, None]
        keys = names * in_key
        words = keys.view(np.uint64)
        first = np.empty(len(kept), dtype=bool)
        first[0] = self._last_key != keys[0, : dots[0]].tobytes()
        first[1:] = (words[1:] != words[:-1]).any(1) | (dots[1:] != dots[:-1])
        self._last_key = keys[-1, : dots[-1]].tobytes()
        self._keys.append(names[first][in_key[first]].tobytes())
        numbers = self._part_numbers(names, dots + 1, lengths)
        parts = np.stack([members.offsets[kept], members.sizes[kept], numbers], 1)
        self._runs.append((members.headers[kept][first], np.flatnonzero(first) + self._rows, dots[first], parts))
        self._rows += len(kept)

    def _part_numbers(self, names: Bytes2D, starts: Int64, stops: Int64) -> list[int]:
        """Number of each name's bytes from start to stop, in the order of first appearance."""
        text = names.tobytes()
        numbers = self._numbers
        before = np.arange(len(names)) * names.shape[1]
        places = zip((before + starts).tolist(), (before + stops).tolist(), strict=True)
        return [numbers.setdefault(text[start:stop], len(numbers)) for start, stop in places]

    def fields(self) -> dict[str, Any]:
        """The samples as fields of :class:`~energon_lite.storage.tar.tar_scan.ShardScan`."""
        headers, first_part, key_lengths, parts = map(np.concatenate, zip(*self._runs, strict=True))
        return {
            "headers": headers,
            "first_part": np.append(first_part, self._rows),
            "parts": parts,
            "part_names": tuple(text.decode("utf-8", "surrogateescape") for text in self._numbers),
            "key_offsets": np.append(0, np.cumsum(key_lengths)),
            "keys": b"".join(self._keys),
        }


def _dots(members: MemberColumns) -> Int64:
    """End of the key in each name, ``[n]``; -1 for members of no sample (:func:`split_member_name`)."""
    names = members.names
    dots, slashes = names == ord("."), names == ord("/")
    start: Int64 = np.zeros(len(names), dtype=np.int64)
    if slashes.any():
        start = np.where(slashes.any(1), names.shape[1] - slashes[:, ::-1].argmax(1), 0)
        dots &= np.arange(names.shape[1]) >= start[:, None]
    dot: NDArray[np.int64] = dots.argmax(1)
    has_part = dots[np.arange(len(dots)), dot]
    hidden, reserved = dot == start, (names[:, 0] == ord("_")) & (names[:, 1] == ord("_"))
    for row in np.flatnonzero(has_part & (hidden | reserved)).tolist():
        has_part[row] = split_member_name(members.name(row)) is not None
    return np.where(has_part, dot, -1)
