"""The size of a picture by its first bytes, as Pillow finds it by reading the file; its patches; columns of both."""

import io
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import DataIndexError, DecodeError, UsageError
from energon_lite.extras.balance.image_columns import IMAGE_HEAD_BYTES, ImageColumns, ImagePatches, image_size
from energon_lite.loading.part_columns import measure_parts
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.extras.balance.test_cost_columns import values_of
from tests.testing import examples

Image = pytest.importorskip("PIL.Image")
FORMATS = ["JPEG", "PNG", "GIF", "WEBP", "BMP"]


def encoded(kind: str, size: tuple[int, int], **options: object) -> bytes:
    stream = io.BytesIO()
    Image.new("P" if kind == "GIF" else "RGB", size).save(stream, kind, **options)
    return stream.getvalue()


def by_header(data: bytes, head: int = IMAGE_HEAD_BYTES) -> tuple[int, int] | None:
    return image_size(data[:head], lambda offset, size: data[offset : offset + size])


@given(st.sampled_from(FORMATS), st.integers(1, 900), st.integers(1, 900))
@settings(max_examples=examples(60), deadline=None)
def test_it_is_what_pillow_says(kind: str, width: int, height: int) -> None:
    assert by_header(encoded(kind, (width, height))) == (height, width)


@pytest.mark.parametrize(
    "data",
    [
        encoded("WEBP", (31, 17), lossless=True),
        encoded("WEBP", (31, 17), exif=b"Exif\0\0" + bytes(20)),
        encoded("JPEG", (31, 17), progressive=True),
        encoded("JPEG", (31, 17), exif=b"Exif\0\0" + bytes(60_000), icc_profile=bytes(90_000)),
    ],
    ids=["lossless", "extended", "progressive", "much before its size"],
)
def test_other_kinds_of_files(data: bytes) -> None:
    assert by_header(data) == (17, 31)
    assert image_size(data) == (17, 31)  # the whole file
    for head in range(30, 400, 7):  # the limit stands anywhere in the header
        assert by_header(data, head) == (17, 31)


@pytest.mark.parametrize(
    "before", ["", "ff", "ff01", "ffd0", "ffd7", "ffc40003ff", "ffc80003ff", "ffcc0003ff", "fffe0002"]
)
@pytest.mark.parametrize("frame", [0xC0, 0xC1, 0xC3, 0xC5, 0xC7, 0xC9, 0xCB, 0xCD, 0xCF])
def test_the_size_of_a_jpeg_is_in_its_frame(before: str, frame: int) -> None:
    data = b"\xff\xd8" + bytes.fromhex(before)
    assert image_size(data + bytes([0xFF, frame, 0, 17, 8, 0, 17, 0, 31])) == (17, 31)


def test_bitmaps_of_both_headers() -> None:
    assert image_size(b"BM" + bytes(12) + b"\x0c\0\0\0" + struct.pack("<HHHH", 31, 17, 1, 24)) == (17, 31)
    assert image_size(b"BM" + bytes(12) + b"\x28\0\0\0" + struct.pack("<ii", 31, -17)) == (17, 31)  # top down


@pytest.mark.parametrize(
    ("data", "words"),
    [
        *((b"\xff\xd8\xff" + end + bytes(20), "no frame") for end in (b"\xd9", b"\xda")),
        (b"\xff\xd8\xff\xfe\0\2" + bytes(20), "no marker at byte 6"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\4CgBI" + bytes(20), "first chunk is not a header"),
        (b"RIFF\0\0\0\0WEBPVP8L" + bytes(20), "not a picture"),
        (b"RIFF\0\0\0\0WEBPVP8 " + bytes(20), "not a picture"),
    ],
)
def test_damage_is_told(data: bytes, words: str) -> None:
    with pytest.raises(DecodeError, match=words):
        image_size(data)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_that_was_cut_off_is_damaged(kind: str) -> None:
    data = encoded(kind, (31, 17))
    for length in range(4, 26):
        try:
            found = by_header(data[:length])
        except DecodeError as error:
            assert "damaged" in str(error)
        else:
            assert found in (None, (17, 31))


@given(st.binary(max_size=200), st.sampled_from([b"", b"\xff\xd8", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a"]))
@settings(max_examples=examples(300), deadline=None)
def test_any_bytes_are_a_size_or_damage_or_something_else(data: bytes, begin: bytes) -> None:
    try:
        found = by_header(begin + data)
    except DecodeError:
        return
    assert found is None or min(found) > 0


def test_what_is_no_picture_has_no_size() -> None:
    for data in (
        b"",
        b"a text, not a picture",
        b"BMs are none",
        b"RIFF\0\0\0\0WAVE" + bytes(30),
        random.Random(0).randbytes(100),
    ):
        assert by_header(data) is None


def test_a_segment_without_an_end_is_not_followed_forever() -> None:
    with pytest.raises(DecodeError, match="ends in its header"):
        by_header(b"\xff\xd8" + b"\xff" * 3000)
    with pytest.raises(DecodeError, match="no frame"):
        by_header(b"\xff\xd8" + b"\xff" * 100_000)


# -- patches ----------------------------------------------------------------------------------------------------------


SIZES = st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), min_size=1, max_size=5)


def test_by_hand() -> None:
    sizes = [[480, 640], [28, 55], [1, 1]]
    assert ImagePatches(14)(sizes).tolist() == [34 * 45, 2 * 3, 0]
    assert ImagePatches(14, image_size=28)(sizes).tolist() == [4, 4, 4]
    # 480 and 640 are 17.1 and 22.9 times 28; 55 is nearly twice.
    assert ImagePatches(14, multiple=28)(sizes).tolist() == [34 * 46, 2 * 4, 4]
    # To 10,000 pixels, the sides of 480 x 640 shrink to 86.6 and 115.5: three and four times 28.
    assert ImagePatches(14, multiple=28, max_pixels=10_000)(sizes).tolist() == [6 * 8, 8, 4]
    # To 12,544 pixels, 1 x 1 grows to 112 x 112, and 28 x 55 to 80 x 157.
    assert ImagePatches(14, multiple=28, min_pixels=12_544)(sizes).tolist() == [34 * 46, 6 * 12, 8 * 8]
    # A limit may be reached; sides have one multiple at least.
    assert ImagePatches(14, multiple=28, max_pixels=28 * 56)([[28, 55]]).tolist() == [2 * 4]
    assert ImagePatches(14, multiple=28, min_pixels=28 * 56)([[28, 57]]).tolist() == [2 * 4]
    assert ImagePatches(14, multiple=28, max_pixels=28 * 28)([[480, 640]]).tolist() == [2 * 2]
    assert ImagePatches(14)(np.zeros((0, 2))).tolist() == []


@given(SIZES, st.integers(1, 3), st.integers(20, 3000))
@settings(max_examples=examples(100), deadline=None)
def test_limits_are_kept_and_proportions_nearly(sizes: list[tuple[int, int]], times: int, side: int) -> None:
    multiple = 14 * times
    most = max(side * side, multiple * multiple)
    found = ImagePatches(14, multiple=multiple, max_pixels=most)(sizes)
    for (height, width), patches in zip(sizes, found, strict=True):
        assert patches % times**2 == 0 and patches > 0
        # A side that is shorter than a patch is rounded up, however long the other one is.
        if min(height, width) * side >= max(height, width) * multiple:
            assert patches * 14 * 14 <= most


@pytest.mark.parametrize(
    "wrong", [{"patch_size": 0}, {"patch_size": 14, "multiple": 15}, {"patch_size": 2, "max_pixels": 0}]
)
def test_settings_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        ImagePatches(**wrong)
    with pytest.raises(UsageError, match="with other sizes"):
        ImagePatches(14, image_size=28, max_pixels=100)


# -- columns, by the headers of a data set's images -------------------------------------------------------------------


PATCHES = ImageColumns(ImagePatches(10))


@pytest.fixture
def images(write_dataset: Callable[..., Path], tmp_path: Path) -> Path:
    """Six samples in two shards, with 1, 2, 0, 1 (of a kind that only Pillow knows), 1 and 1 (damaged) images."""
    parts: list[dict[str, bytes]] = [
        {"jpg": encoded("JPEG", (45, 30))},
        {"1.png": encoded("PNG", (20, 20)), "2.webp": encoded("WEBP", (90, 10))},
        {},
        {"jpg": encoded("TIFF", (10, 50))},
        {"jpg": encoded("GIF", (30, 20))},
        {"jpg": b"\xff\xd8\xff\xe0"},
    ]
    samples = [(str(n), part | {"json": json.dumps({"loss": n}).encode()}) for n, part in enumerate(parts)]
    return write_dataset(tmp_path / "images", {"a.tar": samples[:3], "b.tar": samples[3:]})


@pytest.mark.parametrize("workers", [0, 2])
def test_the_headers_of_images_in_one_pass_with_other_parts(images: Path, workers: int) -> None:
    columns = {"loss": "json.loss", "bytes": "*", "png": "1.png"}
    report = measure_parts(str(images), None, columns=columns, others=[PATCHES], workers=workers)
    assert values_of(images, "images") == [1, 2, 0, 1, 1, 0]
    assert values_of(images, "patches") == [3 * 4, 4 + 9, 0, 5, 6, 0]
    assert values_of(images, "squared_patches") == [144, 16 + 81, 0, 25, 36, 0]
    assert values_of(images, "loss") == [0, 1, 2, 3, 4, 5]
    sizes = [[part.stat().st_size for part in sorted(images.glob("*.tar"))], values_of(images, "bytes")]
    assert 0 < sum(sizes[1]) < sum(sizes[0])
    assert [n > 0 for n in values_of(images, "png")] == [False, True, False, False, False, False]
    counts, found = WebdatasetSource.open(images).ragged_column("image_sizes")[np.array([3, 1, 2, 0])]
    assert counts.tolist() == [1, 2, 0, 1]
    assert found.tolist() == [[50, 10], [20, 20], [10, 90], [30, 45]]
    assert WebdatasetSource.open(images).ragged_column("image_patches")[:].values.ravel().tolist() == [12, 4, 9, 5, 6]
    with pytest.raises(DataIndexError, match="no column 'length'"):
        values_of(images, "length")
    assert report.failed == 1 and "it ends in its header" in report.failures[0]
    assert report.columns["patches"] == (6, 36, 13)
    names = (
        "bytes.col image_patches.ragged image_sizes.ragged images.col loss.col patches.col png.col squared_patches.col"
    )
    assert sorted(Path(path).name for path in report.written) == names.split()


def test_ragged_columns_follow_a_choice_of_shards_and_samples(images: Path) -> None:
    measure_parts(str(images), None, others=[ImageColumns()], workers=0)
    whole = WebdatasetSource.open(images).ragged_column("image_sizes")
    source = WebdatasetSource.open(images, shards=["b.tar", "a.tar"], excluded_samples=[("a.tar", "0")])
    part = source.ragged_column("image_sizes")
    assert len(part) == 5 and part.width == 2
    assert part[:].counts.tolist() == [1, 1, 0, 2, 0]
    assert part[np.array([3])].values.tolist() == [[20, 20], [10, 90]]
    assert part.fingerprint != whole.fingerprint
    with pytest.raises(IndexError):
        part[np.array([5])]


def test_what_is_known_is_not_read_again(images: Path) -> None:
    first = measure_parts(str(images), "json", others=[PATCHES], workers=0)
    again = measure_parts(str(images), "json", others=[PATCHES], workers=0)
    assert (first.known, again.known) == (0, 6)
    more = measure_parts(str(images), "json", others=[ImageColumns(ImagePatches(5))], workers=0)
    assert more.known == 0
    assert values_of(images, "patches") == [6 * 9, 16 + 36, 0, 20, 24, 0]
    # What this maker makes no more does not stay; what others made does.
    measure_parts(str(images), None, columns={"own": "*"}, workers=0)
    names = {path.name for path in (images / ".nv-meta/energon_lite.columns").iterdir()}
    assert {"own.col", "patches.col", "length.col"} <= names


def test_columns_are_refused_that_would_stand_in_place_of_others(images: Path) -> None:
    for columns, words in (
        ({"length": "json"}, "a column cannot have this name"),
        ({"patches": "json"}, "a column cannot have this name"),
        ({"one": "jsn"}, "--column one= jsn: no sample has such a part"),
    ):
        with pytest.raises(UsageError, match=words):
            measure_parts(str(images), None, columns=columns, others=[ImageColumns()])
