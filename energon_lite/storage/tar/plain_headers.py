"""Plain tar members in long runs, parsed as arrays.

Almost all members of almost all shards are plain: a regular file, a short name, numbers in octal. For these, Python
does only what has to be done one after the other (a header's size says where the next header is), in a third of a
microsecond; checksums, numbers and names of thousands of headers are then checked and parsed at once. Pax headers that
say nothing that matters here, such as the fractions of seconds that ``webdataset.TarWriter`` writes, are stepped over.

What is not plain, or not in order, ends a run. It is for :class:`~energon_lite.storage.tar.tar_headers.TarHeaders`,
which knows all the rest and says what is wrong.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from energon_lite.storage.files.range_file import RangeFile
from energon_lite.storage.tar.member_columns import Bytes2D, MemberColumns, padded_width
from energon_lite.storage.tar.pax_records import pax_records

__all__ = ["PlainHeaders"]

_BLOCK = 512
_REGULAR, _PAX = b"0x"
_SIZE, _CHECKSUM, _TYPE, _PREFIX = 124, 148, 156, 345
#: Members of a run, more or less: enough that numpy's calls cost nothing, few enough for the processor's cache.
_RUN = 2048
_SMALLEST_CHUNK, _FIRST_CHUNK, _LARGEST_CHUNK = 1 << 12, 1 << 16, 1 << 20
_OCTAL = 8 ** np.arange(10, -1, -1, dtype=np.int64)


class PlainHeaders:
    """Find runs of plain members in an open tar file.

    Args:
        fd: descriptor of the open file, whose position is neither used nor changed; or a remote file.
        size: bytes in the file.
    """

    def __init__(self, fd: int | RangeFile, size: int):
        self._fd, self._size = fd, size
        self._buffer = bytearray(min(_LARGEST_CHUNK, size // _BLOCK * _BLOCK + _BLOCK))
        self._blocks = np.frombuffer(self._buffer, dtype=np.uint8).reshape(-1, _BLOCK)
        self._rows = np.empty((_RUN + _LARGEST_CHUNK // _BLOCK, _BLOCK), dtype=np.uint8)
        self._chunk = _FIRST_CHUNK

    def run(self, position: int) -> tuple[MemberColumns | None, int]:
        """The plain members whose headers follow each other from ``position`` on, and the position after them.

        None if there are none. A run may end early; it goes on at the position that is given.
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
        """What look like headers in the next chunk: their places, that of the next one, and whether it may be plain."""
        view = memoryview(self._buffer)[: self._chunk]
        fd = self._fd
        got = os.preadv(fd, [view], position) if isinstance(fd, int) else fd.read_into(view, position)
        last = got - _BLOCK
        places, place, going = _walk(self._buffer, last)
        # Small members: read many headers at once. Large ones: read little more than the header.
        if len(places) >= 8:
            self._chunk = min(self._chunk * 2, _LARGEST_CHUNK)
        elif len(places) <= 1:
            self._chunk = max(self._chunk // 4, _SMALLEST_CHUNK)
        if not going:  # what stands here may be the rule in this file
            self._chunk = _FIRST_CHUNK
        return places, place, going and bool(places)


def _walk(buffer: bytearray, last: int) -> tuple[list[int], int, bool]:
    """Jump from header to header, up to the one that starts at ``last``. Nothing is checked yet but what is needed to
    get on."""
    places: list[int] = []
    place = 0
    try:
        while place <= last:
            size = int(buffer[place + _SIZE : place + _SIZE + 11], 8)
            if size < 0:
                return places, place, False
            after = place + _BLOCK + ((size + _BLOCK - 1) & -_BLOCK)
            if buffer[place + _TYPE] == _PAX:
                if after > last:  # what it belongs to is not in this chunk
                    break
                if pax_records(bytes(buffer[place + _BLOCK : place + _BLOCK + size])):
                    return places, place, False
            places.append(place)
            place = after
    except ValueError:
        return places, place, False
    return places, place, True


def _parse(rows: Bytes2D, starts: NDArray[np.int64], file_size: int) -> tuple[MemberColumns | None, int]:
    """Parse headers, up to the first that is not plain.

    Args:
        rows: ``[n, 512]``, the headers.
        starts: ``[n + 1]``, where they are in the file, and where the next one would be.
        file_size: bytes in the file.
    """
    pax = rows[:, _TYPE] == _PAX
    digits = rows[:, _SIZE : _SIZE + 11] - ord("0")  # below "0" this wraps around to large numbers
    sizes = digits.astype(np.int64) @ _OCTAL
    zeros = rows[:, :100] == 0
    lengths = zeros.argmax(1)  # 0 too if there is no zero: such a name may go on elsewhere
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
    """Whether each header's checksum, six octal digits and a zero, is that of its bytes."""
    field = rows[:, _CHECKSUM : _CHECKSUM + 8]
    digits = field[:, :6] - ord("0")
    stored = digits.astype(np.int64) @ _OCTAL[5:]
    # The field itself counts as spaces.
    sums = rows.sum(1, dtype=np.uint32) - field.sum(1, dtype=np.uint32) + 8 * ord(" ")
    return (digits < 8).all(1) & (field[:, 6] == 0) & (stored == sums)
