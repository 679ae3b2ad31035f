"""Preparing media and finding key frames, as callers of Energon do it."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np

from energon_lite.extras.media import MediaFilterConfig
from energon_lite.extras.media.media_scan import prepare_media

__all__ = ["AVProbeIndex", "prepare_filesystem_dataset"]


class _Frame(NamedTuple):
    timestamp: int
    is_keyframe: bool


class AVProbeIndex:
    """The frames of a video stream in the order of the file. The whole file is read, but nothing is decoded.

    Args:
        container: what ``av.open`` returned; it is at its beginning afterwards.
        stream_idx: of the video streams.

    Example:
        >>> AVProbeIndex(av.open("a.avi")).search_timestamp(1000)  # the number of the key frame at or before it
        250
    """

    def __init__(self, container: Any, stream_idx: int = 0):
        packets = (packet for packet in container.demux(video=stream_idx) if packet.pts is not None)
        self._frames = [_Frame(packet.pts, packet.is_keyframe) for packet in packets]
        container.seek(0)

    def __len__(self) -> int:
        return len(self._frames)

    def __getitem__(self, idx: int) -> _Frame:
        return self._frames[idx]

    def search_timestamp(self, timestamp: int, *, backward: bool = True, any_frame: bool = False) -> int:
        """The number of a frame near a time; before the first one that is searched, this one.

        Args:
            timestamp: in ticks of the stream's clock.
            backward: the last one at or before it; False: the first one at or after it.
            any_frame: not key frames alone.

        Returns:
            -1: there is none.
        """
        found = [at for at, frame in enumerate(self._frames) if any_frame or frame.is_keyframe]
        times = np.array([self._frames[at].timestamp for at in found], dtype=np.int64)
        place = int(times.searchsorted(timestamp, "right" if backward else "left"))
        place = max(place - 1, 0) if backward else place
        return found[place] if place < len(found) else -1


def prepare_filesystem_dataset(
    root_path: str | os.PathLike[str],
    media_filter: MediaFilterConfig,
    *,
    progress: bool,
    workers: int = 16,
    index_sqlite_tmp_path: Any = None,
) -> int:
    """Extract the metadata of the media files below a folder; returns how many there are.

    Args:
        root_path: the folder.
        media_filter: what is taken for a medium.
        progress: accepted; the command `energon-lite prepare-media` shows it.
        workers: processes at most.
        index_sqlite_tmp_path: a folder in which the database is written first.
    """
    tmp_path = None if index_sqlite_tmp_path is None else os.fspath(index_sqlite_tmp_path)
    return prepare_media(root_path, media_filter, workers=workers, tmp_path=tmp_path).found
