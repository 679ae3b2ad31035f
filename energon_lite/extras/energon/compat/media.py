"""Energon's functions for preparing media and finding key frames."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from energon_lite.extras.media import MediaFilterConfig

__all__ = ["AVProbeIndex", "prepare_filesystem_dataset"]


class _Frame(NamedTuple):
    timestamp: int
    is_keyframe: bool


class AVProbeIndex:
    """Frames of a video stream in the order of the file. The whole file is read, without decoding.

    Args:
        container: result of ``av.open``; its position is at the beginning afterwards.
        stream_idx: index among the video streams.

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
        """Return the number of a frame near a time, or the first candidate if the time is before it.

        Args:
            timestamp: time in ticks of the stream's clock.
            backward: True for the last frame at or before the time; False for the first one at or after it.
            any_frame: True to consider all frames, not only key frames.

        Returns:
            The number of the frame; -1 if there is none.
        """
        candidates = [at for at, frame in enumerate(self._frames) if any_frame or frame.is_keyframe]
        times = np.array([self._frames[at].timestamp for at in candidates], dtype=np.int64)
        place = int(times.searchsorted(timestamp, "right" if backward else "left"))
        place = max(place - 1, 0) if backward else place
        return candidates[place] if place < len(candidates) else -1


def prepare_filesystem_dataset(
    root_path: str | os.PathLike[str],
    media_filter: MediaFilterConfig,
    *,
    progress: bool,
    workers: int = 16,
    index_sqlite_tmp_path: Any = None,
) -> int:
    """Extract the metadata of the media files below a folder; return their number.

    Args:
        root_path: the folder.
        media_filter: rule that selects media files.
        progress: ignored; the command `energon-lite prepare-media` shows progress.
        workers: the most processes.
        index_sqlite_tmp_path: a folder in which the database is first written.
    """
    from energon_lite.extras.media.media_scan import prepare_media

    tmp_path = None if index_sqlite_tmp_path is None else os.fspath(index_sqlite_tmp_path)
    return prepare_media(root_path, media_filter, workers=workers, tmp_path=tmp_path).found
