"""The members of a shard as columns: a hundred thousand of them are a handful of arrays instead of objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bytes2D", "Int64", "Member", "MemberColumns", "padded_width"]

Int64 = NDArray[np.int64]
Bytes2D = NDArray[np.uint8]


class Member(NamedTuple):
    """A regular file in a tar.

    Attributes:
        header_offset: byte at which its first header starts (that of the long name, if it has one).
        name: path in the archive.
        offset: byte at which its payload starts.
        size: bytes of payload.
    """

    header_offset: int
    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class MemberColumns:
    """Consecutive members of a tar, as columns.

    Attributes:
        headers: ``[n]``, byte at which each member's first header starts.
        offsets: ``[n]``, byte at which its payload starts.
        sizes: ``[n]``, bytes of payload.
        names: ``[n, width]`` bytes of the names, padded with zeros; the width is a multiple of 8.
        lengths: ``[n]``, bytes of each name.
    """

    headers: Int64
    offsets: Int64
    sizes: Int64
    names: Bytes2D
    lengths: Int64

    def __len__(self) -> int:
        return len(self.headers)

    def name(self, row: int) -> str:
        """The name of the member in a row."""
        return self.names[row, : self.lengths[row]].tobytes().decode("utf-8", "surrogateescape")

    def members(self) -> list[Member]:
        """Return the members as objects."""
        numbers = zip(self.headers.tolist(), self.offsets.tolist(), self.sizes.tolist(), strict=True)
        return [Member(header, self.name(row), offset, size) for row, (header, offset, size) in enumerate(numbers)]

    @classmethod
    def from_members(cls, members: Sequence[Member]) -> MemberColumns:
        """Make columns of members that were parsed one by one."""
        texts = [member.name.encode("utf-8", "surrogateescape") for member in members]
        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        width = padded_width(int(lengths.max(initial=0)))
        names = np.array(texts, dtype=f"S{width}").view(np.uint8).reshape(-1, width)
        numbers = np.array([(m.header_offset, m.offset, m.size) for m in members], dtype=np.int64).reshape(-1, 3)
        headers, offsets, sizes = numbers.T.copy()
        return cls(headers, offsets, sizes, names, lengths)


def padded_width(length: int) -> int:
    """The next multiple of 8 (at least 8), so that names can be compared eight bytes at a time."""
    return max(8, (length + 7) // 8 * 8)
