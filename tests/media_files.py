"""Files of audio and video, made here: in each second a white frame and a beep, at its beginning."""

from __future__ import annotations

import io
from fractions import Fraction
from functools import cache
from typing import Any

import av
import numpy as np

RATE = 48000
#: Beginning of each second in which there is a tone of 1 kHz.
BEEP = 0.1
FPS = 10
SECONDS = 4
#: Frames of each second that a film of a varying rate does not have.
LEFT_OUT = (2, 3, 7)
CONTAINERS = {
    "mp4": ("libx264", "aac"),
    "mkv": ("libx264", "aac"),
    "webm": ("libvpx", "libopus"),
    "mov": ("mpeg4", "pcm_s16le"),
}
SOUNDS = {"wav": "pcm_s16le", "flac": "flac", "mp3": "libmp3lame"}


def frame(number: int, height: int = 32, width: int = 48) -> Any:
    """White in the first of each second; the others are grey, each a little brighter than the one before."""
    value = 255 if number % FPS == 0 else 20 + 5 * (number % FPS) + number // FPS
    return np.full((height, width, 3), value, np.uint8)


def beeps(seconds: int, channels: int) -> Any:
    """``[1, samples * channels]``, as PyAV takes packed sound; the second channel is the first one, negated."""
    time = np.arange(seconds * RATE) / RATE
    sound = np.where(time % 1 < BEEP, 0.8 * np.sin(2 * np.pi * 1000 * time), 0)
    both = np.stack([sound, -sound][:channels], axis=1)
    return (both * 32767).astype(np.int16).reshape(1, -1)


def add_sound(container: Any, stream: Any, seconds: int, channels: int) -> None:
    samples, step = beeps(seconds, channels), RATE // 10
    for start in range(0, seconds * RATE, step):
        piece = np.ascontiguousarray(samples[:, start * channels : (start + step) * channels])
        sound = av.AudioFrame.from_ndarray(piece, format="s16", layout="stereo" if channels == 2 else "mono")
        sound.sample_rate, sound.pts, sound.time_base = RATE, start, Fraction(1, RATE)
        container.mux(stream.encode(sound))
    container.mux(stream.encode(None))


@cache
def film(kind: str, *, varying: bool = False, seconds: int = SECONDS) -> bytes:
    """A film with sound.

    Args:
        kind: extension.
        varying: leave some frames out.
        seconds: how long it is.
    """
    codec, sound_codec = CONTAINERS[kind]
    names = {"mkv": "matroska"}
    file = io.BytesIO()
    with av.open(file, "w", format=names.get(kind, kind)) as container:
        video = container.add_stream(codec, rate=FPS)
        video.width, video.height, video.pix_fmt = 48, 32, "yuv420p"
        video.codec_context.gop_size = FPS
        video.codec_context.time_base = Fraction(1, FPS)
        sound = container.add_stream(sound_codec, rate=RATE, layout="mono")
        for number in range(seconds * FPS):
            if varying and number % FPS in LEFT_OUT:
                continue
            picture = av.VideoFrame.from_ndarray(frame(number), format="rgb24")
            picture.pts, picture.time_base = number, Fraction(1, FPS)
            container.mux(video.encode(picture))
        container.mux(video.encode(None))
        add_sound(container, sound, seconds, 1)
    return file.getvalue()


@cache
def sound(kind: str, *, seconds: int = SECONDS) -> bytes:
    """A sound of two channels."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(SOUNDS[kind], rate=RATE, layout="stereo")
        add_sound(container, stream, seconds, 2)
    return file.getvalue()


def media(kind: str) -> bytes:
    """A film or a sound, by its extension."""
    return sound(kind) if kind in SOUNDS else film(kind)


@cache
def long_film(kind: str, seconds: int = 600) -> bytes:
    """A long film of noise, without sound: 2 frames a second, a group of pictures each 6 s, of about 130 kB."""
    file, generator = io.BytesIO(), np.random.default_rng(0)
    noise = generator.integers(0, 256, (7, 96, 96, 3), dtype=np.uint8)
    names = {"mkv": "matroska"}
    with av.open(file, "w", format=names.get(kind, kind)) as container:
        video = container.add_stream("mpeg4", rate=2)
        video.width, video.height, video.pix_fmt = 96, 96, "yuv420p"
        video.codec_context.gop_size, video.codec_context.max_b_frames = 12, 0
        video.codec_context.options = {"sc_threshold": "1000000000"}
        video.codec_context.bit_rate = 40_000_000
        video.codec_context.qmax = 2
        video.codec_context.time_base = Fraction(1, 2)
        for number in range(2 * seconds):
            picture = av.VideoFrame.from_ndarray(noise[number % 7], format="rgb24")
            picture.pts, picture.time_base = number, Fraction(1, 2)
            container.mux(video.encode(picture))
        container.mux(video.encode(None))
    return file.getvalue()
