"""Members of a tar as columns, and the parser of long runs of plain ones.

A hundred thousand members are a handful of arrays instead of objects. Almost all members of almost all shards are
plain: a regular file, a short name, numbers in octal. For these, Python does only the sequential part (a header's size
gives the place of the next header), in a third of a microsecond; checksums, numbers and names of thousands of headers
are then checked and parsed at once. Pax headers without relevant records, such as the fractions of seconds that
``webdataset.TarWriter`` writes, are skipped.

A member that is not plain, or is damaged, ends a run. :class:`~energon_lite.storage.tar_headers.TarHeaders`
continues there: it supports all other members and reports damage.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Bytes2D = NDArray[np.uint8]

#: Bytes of a block.
_BLOCK = 512
#: Type of a regular file.
_REGULAR = ord("0")
#: Type of a pax header.
_PAX = ord("x")
#: Offset of the size field in a header.
_SIZE = 124
#: Offset of the checksum field.
_CHECKSUM = 148
#: Offset of the type field.
_TYPE = 156
#: Offset of the prefix field.
_PREFIX = 345
#: Members of a run, approximately: many enough to amortise numpy's calls, few enough for the processor's cache.
_RUN = 2048
#: Smallest read, in bytes.
_SMALLEST_CHUNK = 1 << 12
#: Bytes of the first read.
_FIRST_CHUNK = 1 << 16
#: Bytes of a read at most.
_LARGEST_CHUNK = 1 << 20
#: Fewest headers of a read after which the next one is larger.
_MANY = 8
#: Weights of the 11 octal digits of a number.
_OCTAL = 8 ** np.arange(10, -1, -1, dtype=np.int64)
#: Key by which :func:`pax_records` reports that a member is stored sparsely.
SPARSE = "GNU.sparse"
#: Digits of a size at most: enough for any file, and a limit for Python's conversion of long numbers.
_SIZE_DIGITS = 20
#: The most frequent text: a single record, with seconds and a fraction.
_ONE_TIME = re.compile(rb"(\d+) [amc]time=[\d.]+\n")


class PositionedFile(Protocol):
    """A file that is read by position, sequentially with gaps."""

    def read(self, size: int, offset: int, /) -> bytes:
        """Return ``size`` bytes at ``offset``, fewer at the end of the file."""

    def read_into(self, memory: memoryview, offset: int, /) -> int:
        """Fill ``memory`` with the bytes from ``offset`` on; return the number of bytes that were read."""


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


class PlainHeaders:
    """Finder of runs of plain members in an open tar file.

    Args:
        fd: descriptor of the open file, whose position is neither used nor changed; or a remote file.
        size: bytes in the file.
    """

    def __init__(self, fd: int | PositionedFile, size: int):
        self._fd = fd
        self._size = size
        self._buffer = bytearray(min(_LARGEST_CHUNK, size // _BLOCK * _BLOCK + _BLOCK))
        self._blocks = np.frombuffer(self._buffer, dtype=np.uint8).reshape(-1, _BLOCK)
        self._rows = np.empty((_RUN + _LARGEST_CHUNK // _BLOCK, _BLOCK), dtype=np.uint8)
        self._chunk = _FIRST_CHUNK

    def run(self, position: int) -> tuple[MemberColumns | None, int]:
        """Return the plain members whose headers follow each other from ``position`` on, and the position after them.

        The members are None if there are none. A run may end early; it continues at the returned position.
        """
        starts: list[int] = []
        start, going = position, True
        while going and len(starts) < _RUN:
            places, after, going = self._chunk_headers(start)
            rows = self._rows[len(starts) : len(starts) + len(places)]
            np.take(self._blocks, [place // _BLOCK for place in places], axis=0, out=rows, mode="clip")
            starts += [start + place for place in places]
            start += after
        if not starts:
            return None, position
        return _parse(self._rows[: len(starts)], np.array([*starts, start]), self._size)

    def _chunk_headers(self, position: int) -> tuple[list[int], int, bool]:
        """Candidate headers in the next chunk: their offsets, that of the next one, and True if that may be plain."""
        view = memoryview(self._buffer)[: self._chunk]
        fd = self._fd
        got = os.preadv(fd, [view], position) if isinstance(fd, int) else fd.read_into(view, position)
        last = got - _BLOCK
        places, place, going = _walk(self._buffer, last)
        # Small members: read many headers at once. Large members: read little more than the header.
        if len(places) >= _MANY:
            self._chunk = min(self._chunk * 2, _LARGEST_CHUNK)
        elif len(places) <= 1:
            self._chunk = max(self._chunk // 4, _SMALLEST_CHUNK)
        if not going:  # headers of this kind may be frequent in this file
            self._chunk = _FIRST_CHUNK
        return places, place, going and bool(places)


def _walk(buffer: bytearray, last: int) -> tuple[list[int], int, bool]:
    """Jump from header to header, up to offset ``last``. Only the fields that this needs are checked: return the
    offsets of the headers, the offset of the next one, and False if that cannot be plain."""
    places: list[int] = []
    place = 0
    try:
        while place <= last:
            size = int(buffer[place + _SIZE : place + _SIZE + 11], 8)
            if size < 0:
                return places, place, False
            after = place + _BLOCK + ((size + _BLOCK - 1) & -_BLOCK)
            if buffer[place + _TYPE] == _PAX:
                if after > last:  # its member is not in this chunk
                    break
                if pax_records(bytes(buffer[place + _BLOCK : place + _BLOCK + size])):
                    return places, place, False
            places.append(place)
            place = after
    except ValueError:
        return places, place, False
    return places, place, True


def _parse(rows: Bytes2D, starts: NDArray[np.int64], file_size: int) -> tuple[MemberColumns | None, int]:
    """Parse headers up to the first one that is not plain; return the members, and the position after them.

    Args:
        rows: ``[n, 512]``, the headers.
        starts: ``[n + 1]``, their places in the file, and that of the next header.
        file_size: bytes in the file.
    """
    pax = rows[:, _TYPE] == _PAX
    digits = rows[:, _SIZE : _SIZE + 11] - ord("0")  # below "0" this wraps around to large numbers
    sizes = digits.astype(np.int64) @ _OCTAL
    zeros = rows[:, :100] == 0
    lengths = zeros.argmax(1)  # also 0 if there is no zero: such a name may continue in another field
    plain = (rows[:, _TYPE] == _REGULAR) & (rows[:, _PREFIX] == 0) & (lengths > 0)
    plain |= pax
    plain[1:] &= ~(pax[1:] & pax[:-1])
    plain &= (digits < 8).all(1) & ((rows[:, _SIZE + 11] == 0) | (rows[:, _SIZE + 11] == ord(" ")))
    plain &= _checksums_fit(rows) & (starts[:-1] + _BLOCK + (sizes + _BLOCK - 1) // _BLOCK * _BLOCK <= file_size)
    good = len(plain) if plain.all() else int(plain.argmin())
    if good and pax[good - 1]:
        good -= 1
    members = np.flatnonzero(~pax[:good])
    if not len(members):
        return None, int(starts[0])
    headers = starts[:good][members]
    if pax.any():
        before = members - 1
        headers = np.where((before >= 0) & pax[before], starts[before], headers)
    lengths = lengths[members]
    width = padded_width(int(lengths.max()))
    names = rows[members, :width]
    names[np.arange(width) >= lengths[:, None]] = 0
    return MemberColumns(headers, starts[members] + _BLOCK, sizes[members], names, lengths), int(starts[good])


def _checksums_fit(rows: Bytes2D) -> NDArray[np.bool_]:
    """Mask of the headers whose checksum, six octal digits and a zero, matches their bytes, ``[n]``."""
    field = rows[:, _CHECKSUM : _CHECKSUM + 8]
    digits = field[:, :6] - ord("0")
    stored = digits.astype(np.int64) @ _OCTAL[5:]
    # The checksum field counts as spaces.
    sums = rows.sum(1, dtype=np.uint32) - field.sum(1, dtype=np.uint32) + 8 * ord(" ")
    return (digits < 8).all(1) & (field[:, 6] == 0) & (stored == sums)


# -- records of a pax extended header -------------------------------------------------------------------------------
#
# They describe a member beyond its plain header.


def pax_records(text: bytes) -> dict[str, str]:
    """Parse ``path`` and ``size`` from records ``"<length> <key>=<value>\\n"``; other keys are ignored.

    Raises:
        ValueError: the text cannot be parsed.

    Example:
        >>> pax_records(b"30 mtime=1700000000.123456789\\n13 size=1000\\n")
        {'size': '1000'}
    """
    one_time = _ONE_TIME.fullmatch(text)
    if one_time and int(one_time[1]) == len(text):
        return {}
    records: dict[str, str] = {}
    start = 0
    while start < len(text) and text[start]:
        length, space, _ = text[start : start + 20].partition(b" ")
        stop = start + int(length) if space and length.isdigit() else 0
        key, equals, value = text[start + len(length) + 1 : stop - 1].partition(b"=")
        if not start < stop <= len(text) or not equals or text[stop - 1 : stop] != b"\n":
            raise ValueError("its pax records cannot be parsed")
        if key.startswith(b"GNU.sparse"):
            records[SPARSE] = text_of(value)
        elif key == b"path":
            records["path"] = text_of(value).rstrip("/")
        elif key == b"size":
            if not value.isdigit() or len(value) > _SIZE_DIGITS:
                raise ValueError("its pax size is not a number")
            records["size"] = text_of(value)
        start = stop
    return records


def text_of(raw: bytes) -> str:
    """Decode a name; surrogateescape keeps bytes that are no UTF-8, so that they can be written back."""
    return raw.decode("utf-8", "surrogateescape")
