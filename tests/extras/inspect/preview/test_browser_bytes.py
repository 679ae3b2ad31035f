from __future__ import annotations

import io
import wave
from dataclasses import make_dataclass

import numpy as np
import pytest
import torch
from PIL import Image

from energon_lite.extras.inspect.preview.media import browser_type, made_media, pixels_of, png_of, wav_of, webm_of
from tests.extras.inspect.preview.samples_to_show import ATTACK, sound


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_png_is_what_pillow_reads(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), dtype=np.uint8)
    read = np.asarray(Image.open(io.BytesIO(png_of(pixels))))
    assert np.array_equal(read.reshape(pixels.shape), pixels)


@pytest.mark.parametrize(
    "value",
    [
        torch.full((3, 4, 6), 0.5),
        torch.full((1, 4, 6), 128, dtype=torch.uint8),
        torch.full((3, 4, 6), 0.5, dtype=torch.bfloat16),
        np.full((4, 6, 4), 128, np.uint8),
        Image.new("L", (6, 4), 128),
        Image.new("RGBA", (6, 4), (128, 128, 128, 128)),
    ],
)
def test_pixels_of_all_kinds_of_images(value: object) -> None:
    pixels = pixels_of(value)
    assert pixels is not None and pixels.shape[:2] == (4, 6) and abs(int(pixels[0, 0, 0]) - 128) <= 1


def test_what_is_no_image() -> None:
    for value in (torch.zeros(2, 4, 6), torch.zeros(3, 1, 1), torch.zeros(3, 0, 4), np.zeros((4, 6, 3), bool), "x"):
        assert pixels_of(value) is None


def test_values_out_of_range_are_stretched_and_large_pictures_thinned() -> None:
    stretched = pixels_of(torch.tensor([[[-1.0, 1.0], [0.0, float("nan")]]]))
    assert stretched is not None and stretched[..., 0].tolist() == [[0, 255], [127, 127]]
    thinned = pixels_of(torch.zeros(1, 5000, 4))
    assert thinned is not None and thinned.shape == (1667, 2, 1)


@pytest.mark.parametrize("value", [torch.tensor([0.0, 1.0, -2.0]), np.array([[0, 32767, -32768]], np.int16)])
def test_a_wav(value: object) -> None:
    with wave.open(io.BytesIO(wav_of(value, 22050))) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (1, 22050, 3)
        assert np.frombuffer(file.readframes(3), "<i2").tolist() == [0, 32767, -32768]


def test_clips_are_sent_at_the_rates_of_their_times() -> None:
    sounds, films = torch.zeros(2, 1, 800), torch.zeros(2, 3, 3, 16, 16, dtype=torch.uint8)
    names = ["audio_clips", "audio_timestamps", "video_clips", "video_timestamps"]
    clip = make_dataclass("Clip", names)(sounds, [(0, 1), (0, 2)], films, [(0, 1), (1, 2)])
    for number, rate in enumerate((800, 400)):
        sent = made_media({"it": clip}, ("it", "audio_clips", str(number), "sound"))
        assert sent is not None and sent.content_type == "audio/wav"
        with wave.open(io.BytesIO(sent.read(0, sent.size))) as file:
            assert file.getframerate() == rate
    alone = made_media({"wave": sounds[0]}, ("wave", "sound"))
    assert alone is not None and alone.content_type == "audio/wav"
    film = made_media({"it": clip}, ("it", "video_clips", "1", "film"))
    assert film is not None and film.content_type == "video/webm"


def test_what_a_browser_is_sent_is_told_by_its_bytes() -> None:
    assert browser_type(png_of(np.zeros((2, 2, 3), np.uint8))) == "image/png"
    assert browser_type(sound()) == "audio/wav"
    film = webm_of(torch.zeros(3, 3, 16, 16, dtype=torch.uint8), 5.0)
    assert film is not None and browser_type(film[:300]) == "video/webm"
    for data in (b"<svg onload=alert(1)>", b"<html>", ATTACK.encode(), b"%PDF-1.4", b"", b"II*\0", b"\0\0\1\0"):
        assert browser_type(data) is None
