"""Times of all frames of a video, without decoding, for clips that are given by frame numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import av

__all__ = ["frame_ticks"]


def frame_ticks(container: av.container.InputContainer) -> NDArray[np.int64]:
    """Return the time stamps of all frames of the first video stream, in order, in ticks of its clock: ``[frames]``.

    They come from the index of the file if that has every frame, at equal distances (MP4 of a constant rate).
    Otherwise all packets of the file are read, but nothing is decoded.
    """
    stream = container.streams.video[0]
    if "mov" in container.format.name and stream.frames and len(stream.index_entries) == stream.frames:
        entries = list(stream.index_entries)
        ticks = np.array([entry.timestamp for entry in entries], dtype=np.int64)
        steps = np.diff(ticks)
        if not any(entry.is_discard for entry in entries) and (not len(steps) or (steps == steps[0]).all()):
            return ticks - ticks[0] + (stream.start_time or 0)
    times = [packet.pts for packet in container.demux(stream) if packet.pts is not None]
    container.seek(stream.start_time or 0, stream=stream)
    return np.array(sorted(times), dtype=np.int64)
