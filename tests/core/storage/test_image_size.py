"""Images decoded at the size that is needed, beside images that are decoded in full and then resized by Pillow; and the
size in documents of data sets."""

from __future__ import annotations

import io
import math
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from energon_lite import TaskEncoder
from energon_lite.errors import ConfigError, DecodeError, UsageError
from energon_lite.storage import (
    Fitted,
    ImageSize,
    ImageTarget,
    PatchBudget,
    RandomCrop,
    SampleDecoder,
    ShorterSide,
    decode_to_size,
)
from energon_lite.storage.samples.image_decoding import IMAGE_FORMS
from tests.accidents import damaged
from tests.testing import examples, val_loader, write_dataset

#: Differences between torch's filters and Pillow's, in levels.
ROUNDING = 2
#: Share of the mean difference between neighbouring pixels, and levels, by which a result differs at most.
SHARE, LEVELS = 0.4, 0.5


@cache
def photograph(name: str) -> Any:
    from sklearn.datasets import load_sample_image

    return Image.fromarray(load_sample_image(name))


@pytest.fixture(scope="module", autouse=True)
def photographs() -> None:
    """Loaded before hypothesis draws anything: the import of scikit-learn draws random numbers."""
    for name in ("china.jpg", "flower.jpg"):
        photograph(name)


def stored(image: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    with patch.object(ImageFile, "MAXBLOCK", 1 << 24):  # for noise, which is larger than Pillow expects
        image.save(stream, options.pop("format", "JPEG"), **options)
    return stream.getvalue()


def content(kind: str, height: int, width: int, seed: int) -> Any:
    """A part of a photograph, a smooth image, or noise."""
    rng = np.random.default_rng(seed)
    if kind == "noise":
        return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    if kind == "smooth":
        coarse = rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)
        return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    whole = photograph(kind)
    right, bottom = (int(rng.integers(side // 2, side + 1)) for side in whole.size)
    return whole.resize((width, height), Image.Resampling.LANCZOS, (0, 0, right, bottom))


class Case(NamedTuple):
    data: bytes
    target: ImageTarget
    form: str


SIDES = st.integers(1, 400)
FILTERS = st.sampled_from(["bicubic", "bilinear"])
TARGETS = st.one_of(
    st.builds(ImageSize, SIDES, SIDES, FILTERS),
    st.builds(ImageSize, st.integers(8, 100), resample=FILTERS),
    st.builds(ShorterSide, SIDES, st.none() | st.integers(1, 700), FILTERS),
    st.builds(PatchBudget, st.integers(1, 28), st.integers(1, 900), st.integers(900, 90_000), FILTERS),
    st.builds(RandomCrop, SIDES, SIDES, resample=FILTERS),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    height, width = draw(st.integers(1, 700)), draw(st.integers(1, 700))
    kind = draw(st.sampled_from(["china.jpg", "flower.jpg", "smooth", "noise"]))
    image = content(kind, height, width, draw(st.integers(0, 99))).convert(draw(st.sampled_from(["RGB", "L", "CMYK"])))
    exif = Image.Exif()
    exif[0x0112] = draw(st.integers(1, 8))  # orientation
    data = stored(
        image,
        quality=draw(st.integers(30, 98)),
        subsampling=draw(st.integers(0, 2)),
        progressive=draw(st.booleans()),
        exif=exif,
    )
    return Case(data, draw(TARGETS), draw(st.sampled_from(["torchrgb8", "rgb8", "pil", "torchl8", "rgba8"])))


def in_full(case: Case, seed: int) -> tuple[Any, Any]:
    """What a full decode and Pillow's resize make of it, and the pixels that were decoded."""
    form = {"L": "pill", "RGB": "pil", "RGBA": "pilrgba"}[IMAGE_FORMS[case.form][2]]
    image = SampleDecoder(image_decode=form).decode("jpg", case.data)
    height, width, box = case.target.fit(image.height, image.width, np.random.default_rng(seed))
    top, left, high, wide = box or (0, 0, image.height, image.width)
    method = Image.Resampling[case.target.resample.upper()]
    resized = image.crop((left, top, left + wide, top + high)).resize((width, height), method)
    return np.asarray(resized).astype(int), np.asarray(image).astype(int)


def roughness(pixels: Any) -> float:
    """The mean difference between neighbouring pixels."""
    return float(np.mean([np.abs(np.diff(pixels, axis=axis)).mean() for axis in (0, 1) if pixels.shape[axis] > 1] or 0))


def outcome(case: Case, seed: int) -> Any:
    try:
        return decode_to_size(case.data, case.target, np.random.default_rng(seed), image_decode=case.form)
    except DecodeError as error:
        return str(error)


def last_channels(image: Any, form: str) -> Any:
    pixels = np.asarray(image).astype(int)
    return pixels.transpose(1, 2, 0) if IMAGE_FORMS[form][0] == "torch" and pixels.ndim == 3 else pixels


@given(case=cases(), seed=st.integers(0, 9))
@settings(max_examples=examples(25))
def test_the_result_is_near_to_that_of_a_full_decode(case: Case, seed: int) -> None:
    try:
        expected, whole = in_full(case, seed)
    except DecodeError as error:  # one side is far longer than the other
        assert isinstance(case.target, PatchBudget) and str(error.what) in str(outcome(case, seed))
        return
    result = outcome(case, seed)
    assert not isinstance(result, torch.Tensor) or result.is_contiguous()
    found = last_channels(result, case.form)
    assert found.shape == expected.shape
    assert np.abs(found - expected).mean() <= SHARE * roughness(whole) + LEVELS


@pytest.mark.parametrize("form", ["torchrgb8", "rgb8"])
@pytest.mark.parametrize(("name", "most"), [("china.jpg", 1.4), ("flower.jpg", 0.6)])
def test_photographs_of_a_usual_size(name: str, most: float, form: str) -> None:
    data = stored(photograph(name).resize((1024, 768), Image.Resampling.LANCZOS), quality=85)
    for target in (ImageSize(336), ImageSize(224), ImageSize(128, 160, "bilinear"), ShorterSide(64)):
        case = Case(data, target, form)
        assert np.abs(last_channels(outcome(case, 0), form) - in_full(case, 0)[0]).mean() <= most


@given(case=cases(), seed=st.integers(0, 9))
def test_pillow_alone_gives_the_same_pixels(case: Case, seed: int) -> None:
    expected = outcome(case, seed)
    with patch.dict(sys.modules, {"simplejpeg": None}):
        found = outcome(case, seed)
    assert (found == expected) if isinstance(expected, str) else np.array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("form", ["rgb8", "rgba8"])
@pytest.mark.parametrize("size", [(257, 385), (259, 390), (263, 391)])
def test_parts_of_pixels_at_the_edges_shift_nothing(size: tuple[int, int], form: str) -> None:
    ramp = np.add.outer(np.linspace(0, 120, size[0]), np.linspace(0, 120, size[1])).astype(np.uint8)
    data = stored(Image.fromarray(ramp).convert("RGB"), quality=98, subsampling=0)
    for sides in ((17, 20), (30, 41), (90, 150)):
        case = Case(data, ImageSize(*sides), form)
        assert np.abs(last_channels(outcome(case, 0), form) - in_full(case, 0)[0]).mean() <= 0.5


def test_a_second_decoder_draws_no_other_crop() -> None:
    """Damage that only Pillow accepts."""
    import simplejpeg

    whole = stored(content("flower.jpg", 100, 120, 0))
    middle = len(whole) // 2
    broken = Case(whole[:middle] + b"\xff\xd0" + whole[middle + 2 :], RandomCrop(24), "rgb8")
    with pytest.raises(ValueError, match="Corrupt JPEG data"):
        simplejpeg.decode_jpeg(broken.data, "RGB")
    found = outcome(broken, 0)
    with patch.dict(sys.modules, {"simplejpeg": None}):
        assert found.shape == (24, 24, 3) and np.array_equal(found, outcome(broken, 0))


@dataclass(frozen=True)
class Corner(ImageTarget):
    """A target of one's own: a part of the image from a place on."""

    place: int

    def fit(self, height: int, width: int, rng: Any) -> Fitted:
        return Fitted(100, 100, (self.place, self.place, 700, 700))


@pytest.mark.parametrize(
    ("target", "decoded"),
    [
        (ImageSize(336), (384, 512)),
        (ImageSize(400), (768, 1024)),  # half would be less
        (ImageSize(341), (384, 512)),
        (ImageSize(342), (768, 1024)),  # half is too near to it
        (ImageSize(128), (192, 256)),
        (ImageSize(48), (96, 128)),
        (ShorterSide(336), (384, 512)),
        (PatchBudget(max_pixels=100 * 28 * 28), (384, 512)),
        (Corner(32), (192, 256)),
        (Corner(34), (384, 512)),
        (Corner(35), (768, 1024)),
        (ImageSize(15), (768, 1024)),  # so few pixels need all
    ],
)
def test_the_scale_at_which_a_jpeg_is_decoded(target: ImageTarget, decoded: Any, monkeypatch: Any) -> None:
    import simplejpeg

    shapes, decode = [], simplejpeg.decode_jpeg
    monkeypatch.setattr(
        simplejpeg,
        "decode_jpeg",
        lambda *arguments, **options: shapes.append((pixels := decode(*arguments, **options)).shape[:2]) or pixels,
    )
    data = stored(Image.new("RGB", (1024, 768)))
    SampleDecoder(image_decode="torchrgb8", image_size=target).decode("jpg", data)
    assert shapes == [decoded]


@given(data=st.data(), case=cases())
@settings(max_examples=examples(25))
def test_a_damaged_image_fails_as_it_does_in_full(data: st.DataObject, case: Case) -> None:
    broken = case._replace(data=damaged(data, case.data))
    most = 50_000_000
    try:
        SampleDecoder(image_decode=case.form, max_unpacked_bytes=most).decode("image.jpg", broken.data)
        expected = "decoded"
    except DecodeError as error:
        expected = error.what.partition(")")[2]
    try:
        with patch.object(PatchBudget, "fit", lambda self, *size: Fitted(28, 28)):  # which refuses narrow images
            size, rng = broken.target, np.random.default_rng(0)
            decode_to_size(broken.data, size, rng, image_decode=case.form, max_unpacked_bytes=most)
        assert expected == "decoded"
    except DecodeError as error:
        assert error.what.partition(")")[2] == expected


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("form", ["torchrgb8", "rgb8", "rgba8", "l8", "pil", "torchrgba8"])
def test_other_formats_are_decoded_in_full(kind: str, form: str) -> None:
    image = content("china.jpg", 201, 303, 0)
    if kind in ("PNG", "WEBP"):
        image.putalpha(content("smooth", 201, 303, 1).convert("L"))
    data = stored(image, format=kind)
    for target in (ImageSize(50, 60), ImageSize(250), RandomCrop(40, resample="bilinear")):
        case = Case(data, target, form)
        assert np.abs(last_channels(outcome(case, 3), form) - in_full(case, 3)[0]).max() <= ROUNDING


def test_an_image_of_16_bits_and_floats() -> None:
    data = stored(Image.fromarray(np.full((90, 80), 300, np.uint16)), format="PNG")
    assert set(decode_to_size(data, ImageSize(9, 8), image_decode="l8").flat) == {255}  # as in full
    image = SampleDecoder(image_decode="torchrgb", image_size=ImageSize(9, 8)).decode("png", data)
    assert image.dtype == torch.float32 and image.shape == (3, 9, 8) and image.unique().tolist() == [1.0]


def test_exact_sizes() -> None:
    assert ImageSize(5).fit(7, 9, None) == Fitted(5, 5)
    assert ImageSize(5, 6).fit(7, 9, None) == Fitted(5, 6)
    for wrong in ({"height": 0}, {"height": 5, "width": 0}, {"height": 5, "resample": "box"}):
        with pytest.raises(UsageError):
            ImageSize(**wrong)


@given(SIDES, st.integers(1, 700), st.integers(1, 3000), st.integers(1, 3000))
def test_the_shorter_side(pixels: int, longest: int, height: int, width: int) -> None:
    high, wide, box = ShorterSide(pixels).fit(height, width, None)
    assert box is None and min(high, wide) == pixels and (high <= wide) == (height <= width or high == wide)
    assert abs(max(high, wide) - pixels * max(height, width) / min(height, width)) < 1
    limited = ShorterSide(pixels, longest).fit(height, width, None)
    assert limited == (high, wide, None) or max(limited[:2]) == longest


@pytest.mark.slow
@given(
    st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 40), st.integers(1, 10_000), st.integers(0, 2_000_000)
)
def test_the_budget_of_patches_is_that_of_qwen(height: int, width: int, factor: int, least: int, more: int) -> None:
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    most = max(least, factor**2) + more
    budget = PatchBudget(factor, least, most)
    try:
        expected = module.smart_resize(height, width, factor, least, most)
    except ValueError:
        with pytest.raises(DecodeError, match="200 times"):
            budget.fit(height, width, None)
    else:
        assert budget.fit(height, width, None) == Fitted(*expected)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 99))
def test_a_random_crop_is_inside_of_the_image(height: int, width: int, seed: int) -> None:
    crop = RandomCrop(24, 32)
    high, wide, box = crop.fit(height, width, np.random.default_rng(seed))
    assert box is not None and (high, wide) == (24, 32)
    top, left, box_height, box_width = box
    assert top % 8 == left % 8 == 0 and min(box_height, box_width) >= 1
    assert top + box_height <= height and left + box_width <= width
    assert box == crop.fit(height, width, np.random.default_rng(seed)).box


def test_random_crops_have_the_areas_and_ratios_that_were_asked_for() -> None:
    rng = np.random.default_rng(0)
    boxes = [RandomCrop(8, scale=(0.2, 0.6)).fit(768, 1024, rng).box for _ in range(500)]
    shares = [box[2] * box[3] / (768 * 1024) for box in boxes if box]
    ratios = [math.log(box[3] / box[2]) for box in boxes if box]
    assert 0.19 < min(shares) < 0.25 and 0.55 < max(shares) < 0.61 and abs(np.mean(shares) - 0.4) < 0.03
    assert min(ratios) < -0.25 and max(ratios) > 0.25 and max(map(abs, ratios)) < math.log(4 / 3) + 0.01
    assert len({box[:2] for box in boxes if box}) > 300


def test_what_a_decoder_refuses() -> None:
    with pytest.raises(UsageError, match="RandomCrop draws random numbers"):
        SampleDecoder(image_size=RandomCrop(224))
    with pytest.raises(UsageError, match="images stay bytes"):
        SampleDecoder(image_decode=None, image_size=ImageSize(224))
    with pytest.raises(UsageError, match="did you mean 'torchrgb'"):
        decode_to_size(b"", ImageSize(5), image_decode="torchrgb9")
    with pytest.raises(UsageError, match="max_pixels"):
        PatchBudget(28, max_pixels=100)
    with pytest.raises(UsageError, match="scale"):
        RandomCrop(5, scale=(0.5, 0.1))
    with pytest.raises(DecodeError, match=r"part 'image' \(3 bytes\) cannot be decoded"):
        decode_to_size(b"abc", ImageSize(5))


# -- data sets


def batches_of(path: Path, size: str, **decoder: Any) -> list[Any]:
    """Batches of 12 images of 120 x 160; ``size`` is in the document, ``decoder`` has the settings of the encoder's."""
    samples = [(f"{n:02d}", {"jpg": stored(content("smooth", 120, 160, n))}) for n in range(12)]
    write_dataset(path, {"a.tar": samples}, dataset_yaml=f"sample_type: ImageSample\nfield_map: {{image: jpg}}\n{size}")
    encoder = type("Own", (TaskEncoder,), {"decoder": SampleDecoder(**decoder)})()
    with val_loader(path, batch_size=4, task_encoder=encoder) as loader:
        return [batch.image for batch in loader]


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        ("", (16, 16)),
        ("image_size: null", (16, 16)),
        ("image_size: 48", (48, 48)),
        ("image_size: [48, 32]", (48, 32)),
        ("image_size: {height: 40, resample: bilinear}", (40, 40)),
        ("image_size: {pixels: 48, longest: 56}", (42, 56)),
        ("image_size: {factor: 14, min_pixels: 196, max_pixels: 10000}", (84, 112)),
    ],
)
def test_the_size_of_a_data_set_precedes_that_of_the_decoder(size: str, shape: Any, tmp_path: Path) -> None:
    batches = batches_of(tmp_path / "flowers", size, image_decode="torchrgb8", image_size=ImageSize(16))
    assert [tuple(batch.shape) for batch in batches] == [(4, 3, *shape)] * 3


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("image_size: 8", "images stay bytes"),
        ("image_size: 0", "height is 0"),
        ("image_size: large", "a whole number"),
        ("image_size: [4]", "a list of height and width"),
        ("image_size: {pixels: 4, width: 4}", "unknown key 'width'"),
        ("image_size: {height: 4, resample: box}", "bicubic, bilinear"),
    ],
)
def test_a_wrong_size_in_a_document(size: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{message}[\s\S]*dataset\.yaml:3"):
        batches_of(tmp_path / "flowers", size, image_decode=None if "stay bytes" in message else "rgb8")
