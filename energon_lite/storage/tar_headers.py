"""The members of a tar file, found by reading headers and skipping payloads.

Only the fields that an index needs are parsed: name, type, size, position. POSIX ustar, pax and GNU archives are
supported, with their ways of storing long names and large sizes. Unlike a general tar reader this one is strict: damage
in the middle of a file is an error with its byte offset, not an early end, because an early end would lose samples
silently.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from itertools import islice

from energon_lite.errors import ShardFormatError
from energon_lite.storage.tar_members import (
    SPARSE,
    Member,
    MemberColumns,
    PlainHeaders,
    PositionedFile,
    pax_records,
    text_of,
)

#: Bytes of a block; tar files consist of blocks.
BLOCK = 512

#: The end marker consists of blocks of zeros.
_ZEROS = bytes(BLOCK)
#: Types of regular files.
_REGULAR = b"0\x007"
#: Types of links, devices, folders and pipes: they may have a size field, but never a payload.
_WITHOUT_PAYLOAD = b"123456"
#: Types of extended headers.
_EXTENSIONS = b"xXgLK"
_PAX_GLOBAL = ord("g")
_GNU_NAME = ord("L")
_GNU_LINK = ord("K")
#: Type of a member that is stored sparsely.
_GNU_SPARSE = ord("S")
#: Bytes of an extended header at most; a larger one means damage, and must not be read into memory.
_EXTENSION_LIMIT = 1 << 20
#: Bytes behind the end marker that are checked together.
_TRAILER = 1 << 20
#: Bytes that are read together, since they contain several headers of small members.
_CHUNK = 1 << 13
_WRITE_AGAIN = "copy or write it again, then prepare again; or leave it out with --exclude"

#: Least length of a run of plain members that shows that most members are plain.
_WORTH_A_RUN = 64
#: Most members that are parsed one by one before the next attempt at a run.
_ONE_BY_ONE = 1024

_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"\xfd7zXZ\x00": ("xz", "unxz"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\x04\x22\x4d\x18": ("lz4", "unlz4"),
}


class TarHeaders:
    """Iterate over the regular members of an open tar file; afterwards :attr:`end` and :attr:`notes` are set.

    Args:
        fd: descriptor of the open file, whose position is neither used nor changed; or a remote file.
        size: bytes in the file.
        path: path of the file, for errors.

    Raises:
        ShardFormatError: (while iterating) the file is truncated, damaged, compressed or sparse.

    Example:
        >>> with open("a.tar", "rb") as file:
        ...     names = [m.name for m in TarHeaders(file.fileno(), os.path.getsize("a.tar"), "a.tar")]
    """

    def __init__(self, fd: int | PositionedFile, size: int, path: str):
        self._fd = fd
        self._size = size
        self._path = path
        self._buffer = b""
        self._base = 0
        #: Records of global extended headers, which apply to all later members.
        self._everywhere: dict[str, str] = {}
        #: Byte after the last member, at which the end marker starts.
        self.end = 0
        #: Remarks on oddities that are not errors.
        self.notes: list[str] = []

    def __iter__(self) -> Iterator[Member]:
        return self.members_from(0)

    def members_from(self, position: int) -> Iterator[Member]:
        """Iterate over the members from the header at ``position`` on; there has to be a header."""
        first = position
        extended: dict[str, str] = {}  # records of the extended headers of the next member
        while True:
            block = self._read(position, BLOCK)
            if block == _ZEROS or not block:
                if position != first:
                    raise self._truncated(f"after the extended header at byte {first}")
                self._finish(position, bool(block))
                return
            self._check(block, position)
            kind = block[156]
            size = _number(block[124:136])
            payload = position + BLOCK
            if size < 0:
                raise self._damaged(position, "its size is not a number")
            if kind in _EXTENSIONS:
                # Of several extended headers of one member the first one, the outermost, takes precedence.
                if size > _EXTENSION_LIMIT:
                    raise self._damaged(position, f"it claims to be an extended header of {size} bytes")
                after = self._after(payload, size, "an extended header", position)
                text = self._read(payload, size)
                if kind == _GNU_NAME:
                    extended = {"path": text_of(text.partition(b"\0")[0])} | extended
                elif kind == _PAX_GLOBAL:
                    self._everywhere |= self._pax_records(text, position)
                elif kind != _GNU_LINK:
                    extended = self._pax_records(text, position) | extended
                position = after
                continue
            if kind == _GNU_SPARSE:
                raise self._sparse(position)
            if kind in _REGULAR:
                size = int(extended.get("size", size))
                name = extended["path"] if "path" in extended else self._everywhere.get("path") or _short_name(block)
                after = self._after(payload, size, name, position)
                if kind or not name.endswith("/"):  # a v7 tar marks a folder only by the slash
                    yield Member(first, name, payload, size)
            else:
                after = payload if kind in _WITHOUT_PAYLOAD else self._after(payload, size, "a member", position)
            position = first = after
            extended = {}

    def columns(self) -> Iterator[MemberColumns]:
        """Iterate over the same members as arrays, in the same order, with the same errors, but many times faster."""
        plain = PlainHeaders(self._fd, self._size)
        position, one_by_one = 0, 1
        while True:
            while not self._everywhere:
                run, position = plain.run(position)
                if run is None:
                    break
                yield run
                one_by_one = 1 if len(run) >= _WORTH_A_RUN else one_by_one
            members = list(islice(self.members_from(position), one_by_one))
            if members:
                yield MemberColumns.from_members(members)
                position = members[-1].offset + _padded(members[-1].size)
            if len(members) < one_by_one:
                return
            # If most members are not plain, the attempts must not cost more than they save.
            one_by_one = min(2 * one_by_one, _ONE_BY_ONE)

    def _read(self, position: int, length: int) -> bytes:
        """``length`` bytes at ``position``, fewer at the end of the file."""
        start = position - self._base
        if start < 0 or start + length > len(self._buffer):
            self._buffer = self._bytes(max(_CHUNK, length), position)
            self._base = position
            start = 0
        return self._buffer[start : start + length]

    def _bytes(self, length: int, position: int) -> bytes:
        return os.pread(self._fd, length, position) if isinstance(self._fd, int) else self._fd.read(length, position)

    def _check(self, block: bytes, position: int) -> None:
        if len(block) < BLOCK:
            raise self._truncated(f"in the header at byte {position}")
        if is_header(block):
            return
        if position == 0:
            for magic, (format_name, tool) in _COMPRESSED.items():
                if block.startswith(magic):
                    raise self._error(
                        f"the shard is compressed ({format_name}), so its samples cannot be read at random",
                        f"unpack it with `{tool}` (compressed images gain nothing from it) and prepare again",
                    )
            raise self._error(
                "the file is not a tar file (no header at byte 0)",
                "write it again, remove it, or leave it out with --exclude",
            )
        raise self._damaged(position, "its checksum is wrong")

    def _after(self, payload: int, size: int, name: str, position: int) -> int:
        """Position after a padded payload, which must lie within the file."""
        after = payload + _padded(size)
        if after > self._size:
            raise self._truncated(f"in {name!r}, whose header is at byte {position} and which ends at byte {after}")
        return after

    def _finish(self, end: int, marker: bool) -> None:
        """Check the bytes behind the end marker: any number of zeros. Other bytes may be samples: a header that was
        overwritten by zeros looks like the end, and joined tars have an end marker in the middle."""
        if not end and not marker:
            raise self._error("the shard is an empty file", "write it again, or remove it and prepare again")
        if not marker:
            self.notes.append("no end marker: its writer may not have finished, samples may be missing")
        self.end = position = end
        while chunk := self._bytes(_TRAILER, position):
            rest = chunk.lstrip(b"\0")
            if rest:
                first = position + len(chunk) - len(rest)
                raise self._error(
                    f"the tar file goes on behind its end: blocks of zeros at byte {end} end it, but there are data at "
                    f"byte {first} of {self._size}",
                    "if tars were joined with `cat`, unpack it with `tar --ignore-zeros -xf` and pack it again; if "
                    f"a header was lost, copy or write it again; to do without the rest, `truncate -s {end + BLOCK}`; "
                    "then prepare again; or leave it out with --exclude",
                )
            position += len(chunk)

    def _pax_records(self, text: bytes, position: int) -> dict[str, str]:
        try:
            records = pax_records(text)
        except ValueError as error:
            raise self._damaged(position, str(error)) from None
        if SPARSE in records:
            raise self._sparse(position)
        return records

    def _truncated(self, place: str) -> ShardFormatError:
        return self._error(f"the tar file is truncated: its {self._size} bytes end {place}")

    def _damaged(self, position: int, reason: str) -> ShardFormatError:
        return self._error(f"the tar file is damaged: no valid header at byte {position} ({reason})")

    def _sparse(self, position: int) -> ShardFormatError:
        what = f"the member at byte {position} is stored sparsely, so its bytes are not contiguous"
        return self._error(what, "write the shard without `tar --sparse`")

    def _error(self, what: str, fix: str = _WRITE_AGAIN) -> ShardFormatError:
        return ShardFormatError(what, where=self._path, fix=fix)


def is_header(block: bytes) -> bool:
    """Return True if a block of 512 bytes is a header of a tar file, with the right checksum."""
    if len(block) < BLOCK:
        return False
    field = block[148:156]
    stored = _number(field)
    # adler32's lower half is 1 + the sum of the bytes, modulo 65521: the header's checksum at C speed.
    if stored >= 0 and (stored + sum(field) - 8 * 32 + 1) % 65521 == zlib.adler32(block) & 0xFFFF:
        return True
    # Some old writers summed signed characters.
    return stored == sum(byte - 256 if byte > 127 else byte for byte in block[:148] + block[156:]) + 8 * 32


def _padded(size: int) -> int:
    return (size + BLOCK - 1) // BLOCK * BLOCK


def _number(field: bytes) -> int:
    """The value of a number field: octal text, or (GNU, large files) big-endian, marked by its first bit; else -1."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return -1


def _short_name(block: bytes) -> str:
    name = block[:100].partition(b"\0")[0]
    if block[345] and block[257:263] == b"ustar\0":
        return text_of(block[345:500].partition(b"\0")[0] + b"/" + name)
    return text_of(name)
