"""Rules, against Energon's own: what a part becomes, over all extensions and image forms; which members make a sample;
and a sample in words."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from megatron.energon import SampleDecoder as EnergonDecoder
from megatron.energon.flavors.webdataset.config import skip_meta_re, split_name_re
from megatron.energon.sample_utils import format_sample_detailed as theirs
from PIL import Image

from energon_lite.extras.energon.compat.hooks import format_sample_detailed
from energon_lite.storage.samples.decoding import IMAGE_FORMS, SampleDecoder
from energon_lite.storage.tar.tar_scan import split_member_name


def image(mode: str, kind: str) -> bytes:
    pixels = np.random.default_rng(5).integers(0, 256, (4, 3, len(mode)), dtype=np.uint8)
    return saved(Image.fromarray(pixels[..., 0] if mode == "L" else pixels, mode).save, kind)


def saved(save: Callable[..., Any], *arguments: Any, **arrays: Any) -> bytes:
    buffer = io.BytesIO()
    save(buffer, *arguments, **arrays)
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
ARRAY = np.array([[1.5, -2.0]], dtype=np.float16)
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
    "npy": saved(np.save, ARRAY),
    "npz": saved(np.savez, a=ARRAY, b=ARRAY[0]),
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


# -- which members make a sample: our string arithmetic against Energon's regular expressions -------------------------


names = st.lists(st.sampled_from(["a", "b", ".", "/", "_", "__", "é", " "]), min_size=1, max_size=10).map("".join)


@given(names)
@example("__/a.b")
@example("____/a.b")
@example("./.x")
@example("a/./.x.y")
@example("a//.x")
def test_grouping(name: str) -> None:
    match = None if skip_meta_re.match(name) else split_name_re.match(name)
    assert split_member_name(name) == (match.groups() if match else None)


# -- a sample in words is what Energon makes of it --------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    n: int
    nested: dict


@pytest.mark.parametrize("indent", ["", "  "])
@pytest.mark.parametrize(
    "sample",
    [
        {"i": -3, "f": 2.5, "b": False, "n": None, "text": "hi", "lines": "a\nb", "many": (1, 2, "x")},
        {"list": [{"k": 1}, {"k": 2}], "pair": Pair(9, {"a": 1}), "bytes": b"abc", "type": object},
        {"t": torch.arange(20.0), "few": torch.tensor([0.0, 2.0]), "none": torch.zeros(0), "matrix": torch.ones(2, 2)},
        {"a": np.array([1, 2, 3]), "long": np.arange(9), "none": np.zeros(0), "words": np.array(["a"])},
        {"text": "x" * 2000, "list": list(range(30)), **{str(number): number for number in range(40)}},
        "text",
        5,
    ],
)
def test_equal_text(sample, indent):
    assert format_sample_detailed(sample, indent) == theirs(sample, indent)
