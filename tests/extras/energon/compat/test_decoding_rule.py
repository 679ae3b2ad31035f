"""What a part becomes: our decoder against Energon's, over all extensions and image forms."""

from __future__ import annotations

import gzip
import io
import json
from typing import Any

import msgpack
import numpy as np
import pytest
from megatron.energon import SampleDecoder as EnergonDecoder
from PIL import Image

from energon_lite.storage.samples.decoding import IMAGE_FORMS, SampleDecoder


def image(mode: str, kind: str) -> bytes:
    pixels = np.random.default_rng(5).integers(0, 256, (4, 3, len(mode)), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels[..., 0] if mode == "L" else pixels, mode).save(buffer, kind)
    return buffer.getvalue()


def array(*, many: bool) -> bytes:
    buffer = io.BytesIO()
    values = np.array([[1.5, -2.0]], dtype=np.float16)
    if many:
        np.savez(buffer, a=values, b=values[0])
    else:
        np.save(buffer, values)
    return buffer.getvalue()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if hasattr(one, "shape"):
        alike = type(one) is type(other) and one.dtype == other.dtype
        return alike and np.array_equal(np.asarray(one), np.asarray(other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("form", IMAGE_FORMS)
@pytest.mark.parametrize("file", ["L png", "RGB png", "RGBA png", "RGB jpeg", "RGB bmp"])
def test_images(form: str, file: str) -> None:
    mode, kind = file.split()
    data = image(mode, kind)
    ours = SampleDecoder(image_decode=form).decode(kind, data)
    theirs = EnergonDecoder(image_decode=form).decode(f"key.{kind}", data)
    if form.startswith("pil"):
        assert (ours.mode, ours.size, ours.tobytes()) == (theirs.mode, theirs.size, theirs.tobytes())
    else:
        assert same(ours, theirs)


PNG = image("RGB", "png")
PARTS = {
    "png": PNG,
    "PNG": PNG,
    "a.b.Png": PNG,
    "txt": "grün\n".encode(),
    "text": b"",
    "transcript": b"x",
    "TXT": b"x",
    "json": json.dumps({"a": [1, 2.5, None, "ü"]}).encode(),
    "a.json": b"[]",
    "JSON": b"[]",
    "jsn": b"1",
    "jsonl": b"{}\n{}",
    "cls": b"3\n",
    "cls2": b"-1",
    "index": b"7",
    "inx": b"0",
    "id": b"12",
    "mp": msgpack.packb({"a": b"x", "b": [1]}),
    "msg": msgpack.packb([1, "x"]),
    "npy": array(many=False),
    "npz": array(many=True),
    "txt.gz": gzip.compress(b"packed"),
    "png.gz": gzip.compress(PNG),
    "gz": gzip.compress(b"packed"),
    "bin": b"\x00",
    "": b"x",
}


@pytest.mark.parametrize("part", PARTS)
def test_parts(part: str) -> None:
    data = PARTS[part]
    theirs = EnergonDecoder()({"__key__": "key", part: data})[part]
    assert same(SampleDecoder().decode(part, data), theirs)
