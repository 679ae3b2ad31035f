"""Metadata of images, audio and video that takes no decoding, its stored form, and its table in ``index.sqlite``. The
form is that of Megatron-Energon: a kind, and a JSON text without unknown entries."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

from typing_extensions import Self

from energon_lite.documents.paths import is_url
from energon_lite.errors import DataIndexError, MissingEntryError, UsageError
from energon_lite.storage.files.atomic_file import only_one, replacing
from energon_lite.storage.files.byte_ranges import url_files
from energon_lite.storage.index.index_cache import cache_folder
from energon_lite.storage.index.nv_meta import META_FOLDER, SQLITE_INDEX

if TYPE_CHECKING:
    import sqlite3

    import av

_FIX = "make it again with `energon-lite prepare-media`"
_NO_TABLE = "make it with `energon-lite prepare-media` (or Energon's); of a URL, upload .nv-meta with the data"


class MediaMetadataType(str, Enum):
    """The kinds of metadata."""

    AV = "av"
    IMAGE = "image"

    @classmethod
    def from_string(cls, value: str) -> MediaMetadataType:
        """Return the kind of that name.

        Raises:
            DataIndexError: the name is unknown (it is a ValueError as well).
        """
        try:
            return cls(value)
        except ValueError:
            raise _Unknown(f"media metadata of the unknown kind {value!r}", fix=_FIX) from None


class _Unknown(DataIndexError, ValueError):
    """Error for cases in which Energon raises a ValueError."""


@dataclass(slots=True, kw_only=True)
class MediaMetadataBase:
    """Base class of the metadata of all kinds."""

    metadata_type: ClassVar[MediaMetadataType]

    def to_dict(self) -> dict[str, Any]:
        """Return the known entries as plain data."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, payload: Mapping[str, Any]) -> Self:
        """Make the metadata from the result of :meth:`to_dict`; unknown entries, as of a later version, are ignored.

        Raises:
            DataIndexError: an entry is missing.
        """
        known = {field.name for field in fields(cls)}
        try:
            return cls(**{name: value for name, value in payload.items() if name in known})
        except TypeError:
            entries = ", ".join(sorted(map(str, payload)))
            what = f"media metadata has the entries {entries or '(none)'} instead of {', '.join(sorted(known))}"
            raise _Unknown(what, fix=_FIX) from None


@dataclass(slots=True, kw_only=True)
class AVMetadata(MediaMetadataBase):
    """Metadata of a video or an audio file. Durations are in seconds; None: unknown, or there is no such stream."""

    metadata_type: ClassVar[MediaMetadataType] = MediaMetadataType.AV

    video_duration: float | None = None
    video_num_frames: int | None = None
    video_fps: float | None = None
    video_width: int | None = None
    video_height: int | None = None

    audio_duration: float | None = None
    audio_channels: int | None = None
    audio_sample_rate: int | None = None
    audio_num_samples: int | None = None


@dataclass(slots=True, kw_only=True)
class ImageMetadata(MediaMetadataBase):
    """Metadata of an image: its size in pixels, and format and mode by Pillow's names (``"JPEG"``, ``"RGB"``)."""

    metadata_type: ClassVar[MediaMetadataType] = MediaMetadataType.IMAGE

    width: int
    height: int
    format: str
    mode: str


_KINDS: dict[MediaMetadataType, type[MediaMetadataBase]] = {
    kind.metadata_type: kind for kind in (AVMetadata, ImageMetadata)
}


def serialize_media_metadata(metadata: MediaMetadataBase) -> tuple[MediaMetadataType, str]:
    """Return the kind, and the entries as JSON."""
    return metadata.metadata_type, json.dumps(metadata.to_dict(), separators=(",", ":"))


def deserialize_media_metadata(
    metadata_type: str | MediaMetadataType, metadata_json: str, *, where: str | None = None
) -> MediaMetadataBase:
    """Make the metadata from its stored form.

    Args:
        metadata_type, metadata_json: result of :func:`serialize_media_metadata`.
        where: place of the stored form, for messages.

    Raises:
        DataIndexError: the kind is unknown, or the text does not fit it.

    Example:
        >>> deserialize_media_metadata("av", '{"audio_channels":2}').audio_channels
        2
    """
    try:
        kind = _KINDS[MediaMetadataType.from_string(metadata_type)]
        payload = json.loads(metadata_json) if metadata_json else {}
        if not isinstance(payload, dict):
            raise _Unknown("media metadata is not a JSON object", fix=_FIX)
        return kind.from_dict(payload)
    except _Unknown as error:
        raise _Unknown(error.what, where=where, fix=_FIX) from None
    except (ValueError, RecursionError) as error:
        raise _Unknown(f"media metadata is not JSON: {error}", where=where, fix=_FIX) from None


def add_video(
    metadata: AVMetadata, container: av.container.InputContainer, duration: bool, count: bool, frame_size: bool
) -> None:
    """Fill in the metadata of the first video stream.

    Args:
        duration: read all packets if the header has no duration.
        count: read all packets to count the frames.
        frame_size: decode the first frame.
    """
    stream = container.streams.video[0]
    length, begin = stream.duration, 0
    if (duration and length is None) or count:
        packets = [packet for packet in container.demux(stream) if packet.pts is not None]
        metadata.video_num_frames = len(packets)
        if duration and length is None and packets:
            length = max(packet.pts + (packet.duration or 0) for packet in packets)
            begin = stream.start_time or 0
    if length is not None:
        metadata.video_duration = (length - begin) * float(stream.time_base)
    if stream.average_rate is not None:
        metadata.video_fps = float(stream.average_rate)
    elif metadata.video_num_frames and metadata.video_duration:
        metadata.video_fps = metadata.video_num_frames / metadata.video_duration
    if frame_size:
        container.seek(stream.start_time or 0, stream=stream)
        first: Any = next(iter(container.decode(stream)), stream)
        metadata.video_width = first.width
        metadata.video_height = first.height


def add_audio(metadata: AVMetadata, container: av.container.InputContainer, duration: bool, samples: bool) -> None:
    """Fill in the metadata of the first audio stream.

    Args:
        duration: read all packets if the header has no duration.
        samples: decode everything and count samples; the duration is then that of the decoded samples. The container
            has to be just opened.
    """
    stream = container.streams.audio[0]
    metadata.audio_sample_rate = stream.sample_rate
    metadata.audio_channels = stream.channels
    length, begin = stream.duration, 0
    if samples:
        metadata.audio_num_samples, end = 0, None
        for frame in container.decode(stream):
            metadata.audio_num_samples += frame.samples
            if frame.pts is not None:
                end = (frame.pts + (frame.duration or 0)) * frame.time_base
        if end is not None:
            length, begin = float(end / stream.time_base), stream.start_time or 0
    elif duration and length is None:
        container.seek(0)
        ends = [packet.pts + (packet.duration or 0) for packet in container.demux(stream) if packet.pts is not None]
        if ends:
            length, begin = max(ends), stream.start_time or 0
    if length is not None:
        metadata.audio_duration = float((length - begin) * float(stream.time_base))


# -- the table ------------------------------------------------------------------------------------------------------


class MediaTable:
    """Media metadata by the names of files.

    Args:
        root: the data set or folder, or its URL.
    """

    def __init__(self, root: str):
        self._root = root
        self._own = threading.local()  # each thread and each process has its own connection

    def __reduce__(self) -> Any:
        return MediaTable, (self._root,)

    def get(self, key: str) -> MediaMetadataBase:
        """Return the metadata of a file.

        Raises:
            UsageError: there is no table of metadata.
            MissingEntryError: the table has no entry for this file.
            DataIndexError: the table or the entry is damaged.

        Example:
            >>> MediaTable("data/films").get("000017.mp4").video_duration
            12.5
        """
        import sqlite3

        query = "SELECT metadata_type, metadata_json FROM media_metadata WHERE entry_key = ?"
        try:
            row = self._connection().execute(query, (key,)).fetchone()
        except sqlite3.Error as error:
            raise DataIndexError(f"media metadata cannot be read: {error}", where=self._root, fix=_NO_TABLE) from error
        if row is None:
            raise MissingEntryError(f"there is no media metadata of {key!r}", where=self._root, fix=_NO_TABLE)
        return deserialize_media_metadata(str(row[0]), str(row[1]), where=f"{self._root} [{key}]")

    def _connection(self) -> sqlite3.Connection:
        opened: tuple[int, sqlite3.Connection] | None = getattr(self._own, "opened", None)
        if opened is not None and opened[0] == os.getpid():
            return opened[1]
        path = _local_copy(self._root) if is_url(self._root) else os.path.join(self._root, META_FOLDER, SQLITE_INDEX)
        if not os.path.isfile(path):
            raise UsageError("there is no media metadata", where=self._root, fix=_NO_TABLE)
        import sqlite3

        # No process writes to the file now; its views and triggers run no functions.
        connection = sqlite3.connect(f"file:{quote(path)}?mode=ro&immutable=1", uri=True)
        connection.execute("PRAGMA trusted_schema = OFF")
        query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'media_metadata'"
        if connection.execute(query).fetchone() is None:
            connection.close()
            raise UsageError("there is no media metadata", where=self._root, fix=_NO_TABLE)
        self._own.opened = os.getpid(), connection
        return connection


def _local_copy(url: str) -> str:
    """Path of a copy in the user's cache of the ``index.sqlite`` of a remote data set."""
    version = url_files(url).list_files(url, META_FOLDER).get(SQLITE_INDEX)
    if version is None:
        raise UsageError("there is no media metadata", where=url, fix=_NO_TABLE)
    name = hashlib.sha256(f"{url.rstrip('/')} {sorted(version.items(), key=str)}".encode()).hexdigest()[:24]
    path = os.path.join(cache_folder(), "media", f"{name}.sqlite")
    if not os.path.isfile(path):
        with only_one(path), replacing(path) as temporary:
            url_files(url).copy_file(url, f"{META_FOLDER}/{SQLITE_INDEX}", temporary, version.get("size"))
    return path
