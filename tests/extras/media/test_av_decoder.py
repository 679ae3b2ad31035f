from __future__ import annotations

import io
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import DecodeError, FatalSampleError, UsageError
from energon_lite.extras.media import AVDecoder, get_clips_uniform, get_single_frames_uniform
from energon_lite.extras.media.container import missing_bytes
from energon_lite.storage import open_stream
from tests.media_files import CONTAINERS, FPS, LEFT_OUT, RATE, SECONDS, SOUNDS, film, frame, media, sound
from tests.testing import examples

KINDS = [*CONTAINERS, *SOUNDS]


def decoder(data: bytes) -> AVDecoder:
    return AVDecoder(io.BytesIO(data))


def brightness(clip: torch.Tensor) -> list[float]:
    return clip.float().mean(dim=(1, 2, 3)).tolist()


def loudness(clip: torch.Tensor) -> float:
    values = clip.double() / (32768 if clip.dtype == torch.int16 else 1)
    return float(values.abs().max())


@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_flashes_and_beeps_are_in_step(kind: str, varying: bool) -> None:
    decode = decoder(film(kind, varying=varying))
    for second in range(SECONDS):
        (flash, before), _ = decode.get_video_clips([(second, second), (second + 0.95, second + 0.95)])
        assert len(flash) == len(before) == 1
        assert brightness(flash)[0] > 240 and brightness(before)[0] < 100
        (beep, silence), _ = decode.get_audio_clips([(second, second + 0.05), (second + 0.5, second + 0.6)])
        assert loudness(beep) > 0.5 and loudness(silence) < 0.05
    # Where a frame is left out, the one before is still shown.
    for number in range(FPS):
        shown = max(one for one in range(number + 1) if not varying or one % FPS not in LEFT_OUT)
        ((clip,), ((start, _),)) = decode.get_video_clips([(1 + number / FPS + 0.03, 1 + number / FPS + 0.03)])
        assert len(clip) == 1 and start == pytest.approx(1 + shown / FPS, abs=0.002)
    # The first moment that is loud, and the time of the first frame that is bright, in the whole file.
    whole = decode.get_video_with_audio()
    assert whole.video_clips and whole.audio_clips and whole.audio_timestamps
    per_second = FPS - varying * len(LEFT_OUT)
    bright = [place for place, value in enumerate(brightness(whole.video_clips[0])) if value > 240]
    assert bright == [second * per_second for second in range(SECONDS)]
    loud = np.flatnonzero((whole.audio_clips[0].double()[0] / (32768 if kind == "mov" else 1)).abs() > 0.3)
    starts = [loud[0], *loud[1:][np.diff(loud) > RATE // 2]]
    begin = whole.audio_timestamps[0][0]
    assert [begin + one / RATE for one in starts] == pytest.approx(range(SECONDS), abs=0.01)


@pytest.mark.parametrize("varying", [False, True])
@settings(max_examples=examples(12))
@given(data=st.data(), kind=st.sampled_from([*CONTAINERS]))
def test_a_clip_of_frames_is_a_slice(varying: bool, data: Any, kind: str) -> None:
    decode = decoder(film(kind, varying=varying))
    ((whole,), _) = decode.get_video_clips([(0, math.inf)])
    assert len(whole) == (FPS - varying * len(LEFT_OUT)) * SECONDS == decode.get_video_duration(get_frame_count=True)[1]
    assert whole.shape[1:] == (3, 32, 48) and whole.dtype is torch.uint8
    ranges = []
    for _ in range(data.draw(st.integers(1, 3))):
        first = data.draw(st.integers(0, len(whole) - 1))
        ranges.append((first, data.draw(st.integers(first, len(whole) + 5))))
    clips, times = decode.get_video_clips(ranges, video_unit="frames")
    for (first, last), clip, (start, end) in zip(ranges, clips, times, strict=True):
        assert torch.equal(clip, whole[first : last + 1])
        assert varying or start == pytest.approx(first / FPS, abs=2e-3)
        assert varying or end == pytest.approx((min(last, len(whole) - 1) + 1) / FPS, abs=2e-3)
    if varying:
        return
    # The same by time; whatever a float makes of a tenth of a second.
    clips, _ = decode.get_video_clips([(first * 0.1, max(first * 0.1, last / FPS)) for first, last in ranges])
    for (first, last), clip in zip(ranges, clips, strict=True):
        assert torch.equal(clip, whole[first : last + 1])


@settings(max_examples=examples(15))
@given(data=st.data(), kind=st.sampled_from(["wav", "flac", "mp3", "mp4", "mov"]))
def test_a_clip_of_sound_is_a_slice(data: Any, kind: str) -> None:
    decode = decoder(media(kind))
    ((whole,), ((begin, _),)) = decode.get_audio_clips([(0, math.inf)])
    first = data.draw(st.integers(math.ceil(begin * RATE), whole.shape[1] - RATE // 5))
    last = data.draw(st.integers(first, first + 2 * RATE))
    ((by_samples,), _) = decode.get_audio_clips([(first, last)], audio_unit="samples")
    ((by_seconds,), _) = decode.get_audio_clips([(first / RATE, last / RATE)])
    shift = round(begin * RATE)
    assert torch.equal(by_samples, whole[:, first - shift : last - shift])
    assert torch.equal(by_seconds, by_samples)
    behind = data.draw(st.integers(0, whole.shape[1] - 1))
    spans = [(last, last + behind), (first, last), (math.ceil(begin * RATE), first)]
    clips, times = decode.get_audio_clips(spans, audio_unit="samples")
    alone = [decode.get_audio_clips([span], audio_unit="samples") for span in spans]
    assert times == [time for _, found in alone for time in found]
    assert all(map(torch.equal, clips, [clip for found, _ in alone for clip in found]))


def test_a_wav_is_opened_once_for_all_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    real = av.open
    monkeypatch.setattr(av, "open", lambda *given, **options: opened.append(options) or real(*given, **options))
    clips, _ = decoder(sound("wav")).get_audio_clips([(second / 2, second / 2 + 0.1) for second in range(4)])
    assert len(clips) == 4 and opened == [{"options": {"probesize": "65536"}}]


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_behind_the_end(kind: str) -> None:
    decode = decoder(media(kind))
    if kind in CONTAINERS:
        assert decode.get_video_clips([(100, 101)]) == ([], [])
        assert decode.get_video_clips([(1000, 1001)], video_unit="frames") == ([], [])
        ((clip,), _) = decode.get_video_clips([(SECONDS - 0.15, 100)])
        assert len(clip) == 2
    assert decode.get_audio_clips([(100, 101)]) == ([], [])
    ((clip,), _) = decode.get_audio_clips([(SECONDS - 0.5, 100)])
    assert 0.4 * RATE < clip.shape[1] < 0.7 * RATE


@pytest.mark.parametrize("span", [(1, 0), (-1, 2), (math.inf, math.inf), (math.nan, 1)])
def test_ranges_that_are_none(span: tuple[float, float]) -> None:
    decode = decoder(film("mp4"))
    for get in (decode.get_video_clips, decode.get_audio_clips):
        with pytest.raises(UsageError, match="range"):
            get([span])


def test_what_is_not_in_the_file() -> None:
    with pytest.raises(DecodeError, match="no video"):
        decoder(sound("wav")).get_video()
    with pytest.raises(DecodeError, match="cannot be decoded: InvalidDataError: Invalid data"):
        decoder(b"this is no film").get_video()
    with pytest.raises(UsageError, match="text"):
        AVDecoder(io.StringIO("film"))  # type: ignore[arg-type]
    assert not decoder(sound("mp3")).has_video_stream() and decoder(film("webm")).has_audio_stream()


@pytest.mark.parametrize("kind", [OSError, av.error.OSError, av.error.PermissionError])
def test_errors_of_ffmpeg_are_the_files_and_others_the_storages(
    kind: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise kind(5, "it failed")

    decode = decoder(film("mp4"))
    monkeypatch.setattr(av, "open", fails)
    with pytest.raises(OSError if kind is OSError else DecodeError, match="it failed"):
        decode.get_video()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_was_cut_off(kind: str) -> None:
    data = media(kind)
    cut = data[: len(data) * 6 // 10]
    decode = decoder(cut)
    with pytest.raises(DecodeError):
        decode.get_video() if kind in CONTAINERS else decode.get_audio()
    with pytest.raises(DecodeError):
        decode.get_audio()
    if kind in ("mkv", "webm", "wav", "mp3"):
        decode.allow_truncated = True
        assert decode.get_audio().audio_clips
    assert decoder(data).get_audio().audio_clips  # and the whole file is not taken for one


def test_bytes_that_are_missing() -> None:
    def box(length: int, kind: bytes, more: bytes = b"") -> bytes:
        return length.to_bytes(4, "big") + kind + more

    file, ebml = box(16, b"ftyp", bytes(8)), b"\x1aE\xdf\xa3\x82\0\0\x18S\x80g"
    frame, tag = b"\xff\xfb" + bytes(34), b"ID3\4\0\0" + bytes([0, 0, 1, 2]) + bytes(130)
    whole = [file, file + box(12, b"mdat", b"text"), file + box(8, b"mdat"), b"RIFF\x08\0\0\0WAVEdata"]
    whole += [file + box(1, b"mdat", (20).to_bytes(8, "big") + b"text"), frame + b"Xing" + box(2, box(52, b"1234"))]
    whole += [ebml + size + b"films" for size in (b"\x85", b"\x40\x05")]
    for name in (b"Xing", b"Info"):
        whole += [start + frame + name + box(3, bytes(4), box(56, b"1234")) for start in (b"", tag)]
    unknown = [file + box(length, b"mdat", b"text, to the end") for length in (0, 7)]
    unknown += [b"RIFF" + length + b"WAVEdata" for length in (bytes(4), b"\xff" * 4, b"\xff" * 3 + b"\x7f")]
    unknown += [ebml + size + b"films" for size in (b"\xff", b"\x01" + b"\xff" * 7)] + [ebml[:-1] + b"X\x89other"]
    unknown += [frame + b"Xing" + box(1, box(99, b"1234")), frame + b"none" + box(3, bytes(4), box(99, b"1234"))]
    for data in (*whole, *unknown, b"something else"):
        found = [missing_bytes(io.BytesIO(part)) for part in (data, data[:-3])]
        assert found == [0, 3 if data in whole else 0], data


def test_metadata() -> None:
    found = decoder(film("mp4")).get_metadata()
    assert (found.video_duration, found.video_num_frames, found.video_fps) == (SECONDS, SECONDS * FPS, FPS)
    assert (found.video_width, found.video_height, found.audio_channels) == (48, 32, 1)
    assert found.audio_sample_rate == RATE and found.audio_duration == pytest.approx(SECONDS, abs=0.05)
    for kind in SOUNDS:
        found = decoder(sound(kind)).get_metadata(get_audio_num_samples=True)
        assert found.audio_num_samples == decoder(sound(kind)).get_audio().audio_clips[0].shape[1]  # type: ignore[index]
        assert found.video_duration is None and found.audio_channels == 2


def test_uniform_clips() -> None:
    decode = decoder(film("mp4"))
    found = get_clips_uniform(decode, 1, 3, request_video=True, request_audio=True, video_out_frame_size=(16, 8))
    assert found.video_clips is not None and found.audio_clips is not None
    assert [clip.shape for clip in found.video_clips] == [(11, 3, 8, 16)] * 2 + [(10, 3, 8, 16)]
    assert [clip.shape for clip in found.audio_clips] == [(1, RATE)] * 3
    frames, times = get_single_frames_uniform(decode, 4, return_timestamps=True)
    assert frames.shape == (4, 3, 32, 48) and times == pytest.approx([0, 1.3, 2.6, 3.9], abs=0.1)
    with pytest.raises(UsageError, match="neither"):
        get_clips_uniform(decode, 1, 3)
    with pytest.raises(UsageError, match="shorter"):
        get_clips_uniform(decode, 10, 3, request_audio=True)


@pytest.mark.parametrize("how", ["bytes", "file", "range"])
def test_another_process_gets_it(tmp_path: Path, how: str) -> None:
    path = tmp_path / "film.mp4"
    path.write_bytes(film("mp4"))
    with open(path, "rb") as file:
        stream: Any = {"bytes": io.BytesIO(film("mp4")), "file": file, "range": open_stream(path)}[how]
        first = AVDecoder(stream)
        packed = pickle.dumps(first)
        assert len(packed) < 1000 or how == "bytes"
        second = pickle.loads(packed)
        assert torch.equal(*(get_single_frames_uniform(one, 3) for one in (first, second)))
        assert second.get_metadata() == first.get_metadata()


def test_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(FatalSampleError, match=r"energon-lite\[av\]"):
        decoder(film("mp4")).get_video()


@pytest.mark.parametrize("count", [5, 39, 40])
def test_frames_of_a_clock_with_one_tick_a_frame(count: int) -> None:
    """The middle of a frame is half a tick there, as in AVI files: the last frame was lost to rounding."""
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as container:
        stream = container.add_stream("mpeg4", rate=FPS, width=48, height=32, pix_fmt="yuv420p")
        for number in range(40):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame(number), format="rgb24")))
        container.mux(stream.encode(None))
    decoder = AVDecoder(io.BytesIO(file.getvalue()))
    frames, times = get_single_frames_uniform(decoder, count, return_timestamps=True)
    assert len(frames) == len(times) == count and times[0] == 0 and times[-1] == pytest.approx(3.9)
    if count == 40:
        assert times == pytest.approx([number / FPS for number in range(40)])
