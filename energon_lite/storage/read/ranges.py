"""Ranges of files that are read on their own: in advance from slow storage, or when a stream comes to them.

A range that is read in advance goes through a cache, whose door to the guest is here. A stream is a stretch of a file
that fetches only the bytes that are read, for audio and video, local or behind a URL: a clip of a long film takes its
header and the group of pictures around the clip. No file stays open between two reads; the stream can be pickled, and
used in any process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from energon_lite.documents.paths import absolute_path
from energon_lite.errors import UsageError
from energon_lite.storage.files.byte_ranges import RangedFile, read_bytes, remote_guest, size_of
from energon_lite.storage.files.shard_store import Shard, ShardRange, shared_store

#: Bytes of a request at least.
_LEAST = 32 << 10
#: Bytes of a request at most, while reading on without a known stretch.
_MOST = 4 << 20
#: A request is 1/8 of the bytes that were just read without a gap, so that few bytes are fetched in vain.
_SHARE = 8
#: Bytes of one request for a stretch that is known to be wanted.
_LARGEST = 8 << 20
#: Bytes of a request right behind such a stretch: often only the next picture is read.
_BEHIND = 8 << 10
#: Bytes that a stream keeps: a file is opened several times, and its header read each time.
_KEPT = 32 << 20


@dataclass(frozen=True)
class ReadAhead:
    """Settings for reading a data set on slow storage in advance.

    Args:
        memory_bytes: bytes of ranges that each process keeps in memory (or mapped from ``folder``).
        requests: requests of one process at the same time.
        hedge: send a second request for a range that takes twice as long as usual; the first answer counts.
        folder: a folder on a local disk, shared by all workers and ranks of a machine and kept from run to run, so
            that each range crosses the network once. Only this user can read its files, and each range is verified
            when it is taken from there. None: memory only; then each worker fetches for itself.
        folder_bytes: size of the folder in bytes; beyond it, the least recently used ranges are removed.

    Example:
        >>> dataset = get_train_dataset("s3://bucket/coco", shuffle_buffer_size=1000, max_samples_per_sequence=100,
        ...                             read_ahead=ReadAhead(folder="/local/cache"), ...)
    """

    memory_bytes: int = 256 << 20
    requests: int = 64
    folder: str | None = None
    folder_bytes: int = 64 << 30
    hedge: bool = True

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "requests", "folder_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"read_ahead: {name} is {getattr(self, name)}", fix="give at least 1")


class RangeCache(Protocol):
    """Cache of ranges of shards that are requested ahead, many at the same time.

    ``(settings) -> RangeCache`` is the entry ``range_cache`` of the table ``STORAGE_GUESTS``: the cache that all data
    sets of the process with these settings share.
    """

    def prefetch(self, ranges: Iterable[ShardRange]) -> None:
        """Start to fetch the ranges that will be loaded next, as far as there is room for them. Does not wait."""

    def load(self, ranges: Iterable[ShardRange]) -> None:
        """Fetch these ranges and hold them until the next call. A failed range raises in :meth:`get`."""

    def get(self, one: ShardRange) -> memoryview:
        """Return the bytes of a range.

        Raises:
            MissingShardError, ShardChangedError, DatasetError: as
                :meth:`~energon_lite.storage.files.shard_store.ShardStore.read`.
        """


def range_cache(settings: ReadAhead) -> RangeCache:
    """Return the cache of this process for these settings.

    Raises:
        UsageError: the guest is not installed.
    """
    opened: Callable[[ReadAhead], RangeCache] = remote_guest("range_cache", "shards are read ahead", "read_ahead")
    return opened(settings)


class PartRange(NamedTuple):
    """A part of a sample that has not been read yet: its place in its shard.

    Attributes:
        shard: path and identity of its shard.
        offset, size: position and length in the shard, in bytes.
        read_ahead: settings for reading the shard through the cache; None: it is read directly.
    """

    shard: Shard
    offset: int
    size: int
    read_ahead: ReadAhead | None = None

    def read(self, offset: int, size: int) -> bytes:
        """Read ``size`` bytes of the part from ``offset`` on.

        Raises:
            DatasetError: as :meth:`~energon_lite.storage.files.shard_store.ShardStore.read`.
        """
        if self.read_ahead is not None:
            return bytes(range_cache(self.read_ahead).get(ShardRange(self.shard, self.offset + offset, size)))
        return shared_store().read(*self.shard, self.offset + offset, size)

    def open(self) -> RangeStream:
        """Return the part as a stream."""
        return RangeStream(self)


class StreamedParts(NamedTuple):
    """The parts of samples that are streamed instead of read with the sample.

    Attributes:
        names: names of such parts.
        above: only parts of more than this many bytes are streamed.
    """

    names: frozenset[str]
    above: int

    def takes(self, name: str, size: int) -> bool:
        """Return True if a part of this name and size is streamed."""
        return size > self.above and name in self.names


class _File(NamedTuple):
    """A stretch of a file that belongs to no data set."""

    path: str
    offset: int
    size: int

    def read(self, offset: int, size: int) -> bytes:
        return read_bytes(self.path, self.offset + offset, size)


class RangeStream(RangedFile):
    """A stretch of a file. Make one with :func:`open_stream`.

    Args:
        place: the stretch, which reads its bytes.

    Attributes:
        fetched: bytes that were fetched.
        requests: number of requests.
    """

    def __init__(self, place: PartRange | _File):
        super().__init__(place.size, place.read)
        self.place = place
        self.fetched = self.requests = 0
        #: Fetched bytes by their start offset; the oldest comes first.
        self._kept: dict[int, bytes] = {}
        self._window = (0, 0)
        self._run = (0, 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return RangeStream, (self.place,)

    def __repr__(self) -> str:
        path = self.place.path if isinstance(self.place, _File) else self.place.shard[0]
        return f"RangeStream({path!r}, {self.place.offset}, {self.size})"

    def fetch_ahead(self, start: int, stop: int | None) -> None:
        """Announce that the bytes from ``start`` up to ``stop`` (None: the end) will be read. They are fetched together
        at the first read of one of them, and no byte beyond them."""
        self._window = start, self.size if stop is None else min(stop, self.size)

    def read(self, size: int | None = -1) -> bytes:
        """Read up to ``size`` bytes, fewer only at the end of the stream; -1: all that are left. At and behind the end
        of the stretch of :meth:`fetch_ahead` the result may be shorter: FFmpeg asks for more than it needs."""
        left = max(0, self.size - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        pieces = []
        while wanted:
            piece = self._piece(self._position, wanted)
            pieces.append(piece)
            self._position += len(piece)
            wanted -= len(piece)
            if self._position >= self._window[1] > 0 and size != -1:
                break
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _piece(self, position: int, wanted: int) -> bytes:
        """Bytes from ``position`` on: at least one and at most ``wanted``."""
        stop = self.size
        for begin, data in self._kept.items():
            if begin <= position < begin + len(data):
                return data[position - begin : position - begin + wanted]
            if position < begin < stop:
                stop = begin
        size = min(self._request(position, wanted), stop - position)
        data = self._read_at(position, size)
        self.fetched += size
        self.requests += 1
        self._run = (self._run[0] if self._run[1] == position else position), position + size
        self._kept[position] = data
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return data[:wanted]

    def _request(self, position: int, wanted: int) -> int:
        low, high = self._window
        if low <= position < high:
            return min(high - position, _LARGEST)
        if self._run[1] == position >= high > 0:
            return min(_MOST, max(_BEHIND, position - high))
        run = position - self._run[0] if self._run[1] == position else 0
        return max(wanted, _LEAST, min(_MOST, run // _SHARE))


def open_stream(path: str | os.PathLike[str], *, offset: int = 0, size: int | None = None) -> RangeStream:
    """Open a file, or a stretch of one, as a binary stream that fetches only the bytes that are read.

    Args:
        path: a local file, or a URL that fsspec knows.
        offset: first byte of the stretch.
        size: length of the stretch in bytes; None: up to the end of the file.

    Raises:
        MissingShardError: there is no such file (it is a FileNotFoundError as well).
        UsageError: the file is shorter.
        DatasetError: the store does not answer.

    Example:
        >>> decoder = AVDecoder(open_stream("s3://bucket/films/long.mp4"))
        >>> clips, times = decoder.get_video_clips([(300, 302)])  # a few requests: not the whole film
    """
    text = absolute_path(path)
    length = size_of(text)
    size = length - offset if size is None else size
    if offset < 0 or size < 0 or offset + size > length:
        raise UsageError(f"there are no {size} bytes at {offset} in a file of {length}", where=text, fix="see its size")
    return RangeStream(_File(text, offset, size))
