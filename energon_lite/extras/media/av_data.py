"""Container of the decoded clips of a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["AVData"]


@dataclass(slots=True, kw_only=True)
class AVData:
    """Decoded clips of one file. Kinds of clips that were not requested are empty lists.

    Args:
        video_clips: ``[frames, channels, height, width]``, uint8, for each clip.
        video_timestamps: start of the first and end of the last frame of each clip, in seconds.
        audio_clips: ``[channels, samples]`` for each clip, in the codec's type: float32 for AAC, MP3 and Opus, int16
            for 16-bit WAV.
        audio_timestamps: start and end of each clip, in seconds.
    """

    video_clips: list[torch.Tensor] | None
    video_timestamps: list[tuple[float, float]] | None
    audio_clips: list[torch.Tensor] | None
    audio_timestamps: list[tuple[float, float]] | None
