"""The size of a picture by its first bytes, as Pillow finds it by reading the file."""

import io
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import DecodeError
from energon_lite.extras.balance.image_columns import IMAGE_HEAD_BYTES, image_size
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
        assert by_header(data, head) == (17, 31) or data[:4] == b"RIFF"


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
    assert by_header(b"") is None
    assert by_header(b"a text, not a picture") is None
    assert by_header(bytes(random.Random(0).randbytes(100))) is None


def test_a_segment_without_an_end_is_not_followed_forever() -> None:
    with pytest.raises(DecodeError, match="ends in its header"):
        by_header(b"\xff\xd8" + b"\xff" * 3000)
    with pytest.raises(DecodeError, match="no frame"):
        by_header(b"\xff\xd8" + b"\xff" * 100_000)
