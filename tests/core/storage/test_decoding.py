from __future__ import annotations

import gzip
import io
import pickle
import sys
import zipfile
from typing import Any
from unittest.mock import patch

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image

from energon_lite.errors import DecodeError, FatalSampleError, UsageError
from energon_lite.storage.samples import decoding, part_decoder
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.image_decoding import FORMATS, IMAGE_EXTENSIONS, IMAGE_FORMS

PIXELS = np.array([[[0, 51, 255], [1, 2, 3]]], dtype=np.uint8)  # one row of two pixels


def saved(function: Any, *values: Any, **named: Any) -> bytes:
    buffer = io.BytesIO()
    function(buffer, *values, **named)
    return buffer.getvalue()


def picture(pixels: Any = PIXELS, kind: str = "png") -> bytes:
    return saved(Image.fromarray(pixels).save, kind)


BLACK = np.zeros((30, 30, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("part", "data", "expected"),
    [
        ("txt", "grün".encode(), "grün"),
        ("caption.text", b"x", "x"),
        ("transcript", b"", ""),
        ("json", b'{"a": [1, null]}', {"a": [1, None]}),
        ("jsn", b"3", 3),
        ("cls", b"7", 7),
        ("cls2", b" 8\n", 8),
        ("index", b"-1", -1),
        ("inx", b"1", 1),
        ("id", b"12", 12),
        ("mp", msgpack.packb({"a": [1, b"x"]}), {"a": [1, b"x"]}),
        ("msg", msgpack.packb(5), 5),
        ("msgpack", msgpack.packb([1, {"b": 2}]), [1, {"b": 2}]),
        ("txt.gz", gzip.compress(b"packed", mtime=0), "packed"),
        ("gz", gzip.compress(b"packed", mtime=0), b"packed"),
        ("bin", b"\x00\x01", b"\x00\x01"),
        ("TXT", b"x", b"x"),
        ("", b"x", b"x"),
    ],
)
def test_by_extension(part: str, data: bytes, expected: object) -> None:
    assert SampleDecoder().decode(part, data) == expected


def test_several_arrays() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    decoded = SampleDecoder().decode("npz", saved(np.savez, a=array, b=array[0]))
    assert decoded.keys() == {"a", "b"} and decoded["b"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("shape", [(7,), (2, 3, 4), ()])
def test_most_headers_of_arrays_are_not_parsed_as_source(shape: tuple[int, ...]) -> None:
    """Which takes longer than all the rest."""
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    data = saved(np.save, array)
    with patch.object(np.lib.format, "read_magic", None):
        assert np.array_equal(part_decoder._decode_array(data), array)


@given(
    array=arrays(
        dtype=st.sampled_from(["<i4", "<f8", ">i2", "|u1", "|b1", "<c8", "<f2", "|i1", "<U3", "<M8[s]"]),
        shape=array_shapes(min_dims=0, max_dims=4, min_side=0),
    ),
    fortran=st.booleans(),
    version=st.sampled_from([None, (2, 0)]),
)
def test_arrays_of_all_kinds_as_numpy_reads_them(array: Any, fortran: bool, version: Any) -> None:
    ordered = np.asfortranarray(array) if fortran and array.ndim else array
    decoded = SampleDecoder().decode("npy", saved(np.lib.format.write_array, ordered, version=version))
    assert decoded.dtype == array.dtype and decoded.shape == array.shape and decoded.flags.writeable
    np.testing.assert_array_equal(decoded, array)


@pytest.mark.parametrize("cut", [5, 60, 127, 128, 130])
def test_an_array_that_is_cut_off(cut: int) -> None:
    data = saved(np.save, np.arange(5))
    for broken in (data[:cut], data.replace(b"(5,)", b"(9,)"), data.replace(b"(5,)", b"(9999999999999,)")):
        with pytest.raises(DecodeError, match="part 'npy'"):
            SampleDecoder().decode("npy", broken)


@pytest.mark.parametrize("size", [(1, 1), (7, 33), (64, 48)])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_the_jpeg_decoder_does_not_change_a_pixel(size: tuple[int, int], subsampling: int, mode: str) -> None:
    rng = np.random.default_rng(0)
    for progressive, quality in ((False, 30), (True, 80), (False, 97)):
        noise = rng.integers(0, 255, (size[1], size[0], 4), dtype=np.uint8)
        image = Image.fromarray(noise, "CMYK").convert(mode)
        data = saved(image.save, "JPEG", quality=quality, subsampling=subsampling, progressive=progressive)
        for form in ("rgb8", "torchrgb", "torchrgb8", "l8", "rgba8"):
            decoder = SampleDecoder(image_decode=form)
            quick = decoder.decode("jpg", data)
            with patch.dict(sys.modules, {"simplejpeg": None}):
                slow = decoder.decode("jpg", data)
            assert quick.dtype == slow.dtype
            np.testing.assert_array_equal(quick, slow)


def test_a_damaged_jpeg_is_the_same_error_with_any_decoder() -> None:
    data = picture(BLACK, "JPEG")
    for cut in (3, 100, 300, len(data) - 40):
        with pytest.raises(DecodeError) as quick:
            SampleDecoder().decode("jpg", data[:cut])
        with patch.dict(sys.modules, {"simplejpeg": None}), pytest.raises(DecodeError) as slow:
            SampleDecoder().decode("jpg", data[:cut])
        assert str(quick.value) == str(slow.value)


def test_the_default_image() -> None:
    image = SampleDecoder().decode("png", picture())
    assert image.dtype == torch.float32 and image.shape == (3, 1, 2) and image.is_contiguous()
    torch.testing.assert_close(image[:, 0, 0], torch.tensor([0.0, 51 / 255, 1.0]), rtol=0, atol=0)


@pytest.mark.parametrize("form", IMAGE_FORMS)
def test_image_forms(form: str) -> None:
    image = SampleDecoder(image_decode=form).decode("seg.PNG", picture())
    container, dtype, mode = IMAGE_FORMS[form]
    channels = {"L": 1, "RGB": 3, "RGBA": 4}[mode]
    if container == "pil":
        assert (image.mode, image.size) == (mode, (2, 1))
        return
    grey = mode == "L"
    expected = (1, 2) if grey else ((channels, 1, 2) if container == "torch" else (1, 2, channels))
    assert tuple(image.shape) == expected
    assert str(image.dtype).rpartition(".")[2] == ("float32" if dtype == "float" else "uint8")
    if not grey:
        assert float(image.max()) == (255 if dtype == "uint8" else 1)


@pytest.mark.parametrize("kind", ["png", "jpeg", "bmp", "gif", "webp"])
def test_pictures_of_the_web_are_read_whatever_their_name_says(kind: str) -> None:
    """They are mixed up often; other formats are what they are called."""
    data = picture(BLACK, kind)
    for name in ("jpg", "png", "webp"):
        assert SampleDecoder(image_decode="rgb8").decode(name, data).shape == (30, 30, 3)
    for name in ("tif", "tga", "ico", "psd"):
        with pytest.raises(DecodeError, match="not an image as the name means"):
            SampleDecoder(image_decode="rgb8").decode(name, data)


def test_every_image_extension_means_what_pillow_says() -> None:
    Image.init()
    for extension in IMAGE_EXTENSIONS:
        assert Image.registered_extensions()["." + extension] in FORMATS.get(extension, ("IPTC",))
    assert {name for names in FORMATS.values() for name in names} <= {*Image.OPEN}


MB = 1 << 20


@pytest.mark.parametrize(
    ("part", "data"),
    [
        ("txt.gz", gzip.compress(bytes(20 * MB))),
        ("txt.gz", gzip.compress(bytes(MB // 2)) * 40),
        ("bin.gz.gz", gzip.compress(gzip.compress(bytes(20 * MB)))),
        ("npz", saved(np.savez_compressed, a=np.zeros(2_500_000))),
        ("png", picture(np.zeros((2500, 2500, 3), dtype=np.uint8))),
        ("jpg", saved(Image.new("RGB", (2500, 2500)).save, format="jpeg")),
        ("jpg", saved(Image.new("L", (2500, 2500)).save, format="jpeg")),
        ("tif", saved(Image.new("L", (2500, 2500)).save, format="tiff", compression="tiff_deflate")),
    ],
    ids=range(8),
)
def test_what_a_few_bytes_may_become_is_bounded(part: str, data: bytes) -> None:
    import tracemalloc

    decoder = SampleDecoder(image_decode="rgb8", max_unpacked_bytes=10 * MB)
    tracemalloc.start()
    try:
        said = rf"part '{part[:3]}.*unpacks to more than {10 * MB} bytes[\s\S]*max_unpacked_bytes"
        with pytest.raises(DecodeError, match=said):
            decoder.decode(part, data)
        assert tracemalloc.get_traced_memory()[1] < 25 * MB
    finally:
        tracemalloc.stop()
    assert pickle.loads(pickle.dumps(SampleDecoder(max_unpacked_bytes=None))).decode(part, data) is not None


def test_a_limit_is_not_a_byte_too_low() -> None:
    for size, is_good in ((1000, True), (1001, False)):
        for data in (gzip.compress(bytes(size)), gzip.compress(bytes(500)) + gzip.compress(bytes(size - 500)) + b"\0"):
            decoder = SampleDecoder(max_unpacked_bytes=1000)
            if is_good:
                assert decoder.decode("bin.gz", data) == bytes(size)
            else:
                with pytest.raises(DecodeError, match="unpacks to more"):
                    decoder.decode("bin.gz", data)
    with pytest.raises(UsageError, match="max_unpacked_bytes is 0"):
        SampleDecoder(max_unpacked_bytes=0)


PACKED = gzip.compress(b"x", mtime=0)


@pytest.mark.parametrize("data", [b"", PACKED[:-1], PACKED + b"y", PACKED * 2], ids=range(4))
def test_gzip_is_unpacked_as_python_does(data: bytes) -> None:
    try:
        expected = gzip.decompress(data)
    except (EOFError, gzip.BadGzipFile):
        with pytest.raises(DecodeError, match=r"part 'bin\.gz'"):
            SampleDecoder().decode("bin.gz", data)
    else:
        assert SampleDecoder().decode("bin.gz", data) == expected


@pytest.mark.parametrize("order", [False, True])
def test_an_array_that_promises_more_than_it_has(order: bool) -> None:
    """What it promises is not allocated."""
    data = saved(np.save, np.asfortranarray(np.zeros((2, 3))) if order else np.zeros((2, 3)))
    promising = data.replace(b"(2, 3), }           ", b"(20000000000, 3), } ")
    assert len(promising) == len(data) and promising != data
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a.npy", promising)
    for part, broken in (("npy", promising), ("npz", stream.getvalue())):
        with pytest.raises(DecodeError, match="longer than its bytes"):
            SampleDecoder().decode(part, broken)


def test_an_unknown_form() -> None:
    with pytest.raises(UsageError, match="did you mean 'torchrgb'"):
        SampleDecoder(image_decode="torchrbg")


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("code that came with the data was run",))


@pytest.mark.parametrize(
    ("part", "data", "message"),
    [
        ("png", b"\x89PNG not really", r"part 'png' \(15 bytes\) cannot be decoded: ValueError: .* not an image"),
        ("jpg", picture()[:40], "part 'jpg'"),
        ("json", b"{", "part 'json'.*JSONDecodeError"),
        ("txt", b"\xff\xfe", "part 'txt'.*UnicodeDecodeError"),
        ("cls", b"cat", "part 'cls'.*ValueError"),
        ("mp", b"\xc1", "part 'mp'"),
        ("npy", b"no", "part 'npy'"),
        ("txt.gz", b"no", "part 'txt.gz'"),
        ("json.gz", gzip.compress(b"{", mtime=0), "part 'json'"),
        ("npy", saved(np.save, np.array([Bomb()])), "allow_pickle"),
        ("npz", saved(np.savez, a=np.array([Bomb()])), "allow_pickle"),
    ],
)
def test_broken_parts(part: str, data: bytes, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        SampleDecoder().decode(part, data)


@pytest.mark.parametrize("part", ["pth", "pkl", "pickle", "pyd", "model.pth", "pkl.gz"])
def test_pickles_are_refused(part: str) -> None:
    data = pickle.dumps(Bomb())
    with pytest.raises(DecodeError, match=r"is a pickle[\s\S]*trust_code=True"):
        SampleDecoder().decode(part, gzip.compress(data) if part.endswith(".gz") else data)


def test_what_is_refused_by_its_name_alone() -> None:
    decoder = SampleDecoder(handlers={"own": len})
    assert [decoder.refuses(part) for part in ("pkl", "own", "json.gz", "txt", "bin")] == [True, *[False] * 4]


def test_trusted_pickles() -> None:
    decoder = SampleDecoder(trust_code=True)
    assert decoder.decode("pkl", pickle.dumps({"a": 1})) == {"a": 1}
    assert decoder.decode("pth", saved(lambda f, v: torch.save(v, f), torch.tensor([1, 2]))).tolist() == [1, 2]


def test_own_handlers_come_first() -> None:
    decoder = SampleDecoder(handlers={"txt": len, "tok": bytes.hex})
    assert [decoder.decode("txt", b"four"), decoder.decode("a.tok", b"\x0f")] == [4, "0f"]
    with pytest.raises(DecodeError, match=r"part 'bad' .* ZeroDivisionError"):
        SampleDecoder(handlers={"bad": lambda data: 1 // 0}).decode("bad", b"")


def test_decoders_compare_and_travel() -> None:
    assert SampleDecoder() == pickle.loads(pickle.dumps(SampleDecoder())) != SampleDecoder(image_decode="pil")
    assert {SampleDecoder(), SampleDecoder()} == {SampleDecoder()}


def test_a_package_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is missing for every sample, so none is left out for it."""
    data = picture()
    monkeypatch.setitem(sys.modules, "PIL", None)
    for part in ("png", "seg.png.gz"):
        said = f"part '{part.removesuffix('.gz')}' needs a package that is not installed: .*PIL"
        with pytest.raises(FatalSampleError, match=rf"{said}[\s\S]*pip install 'energon-lite\[image\]'"):
            SampleDecoder().decode(part, gzip.compress(data) if part.endswith("gz") else data)


@pytest.mark.parametrize("part", ["txt.gz", "json", "npy", "own"])
@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (MemoryError("no memory"), MemoryError),
        (OSError(24, "Too many open files"), FatalSampleError),
        (OSError(12, "Cannot allocate memory"), FatalSampleError),
        (FatalSampleError("stop"), FatalSampleError),
        (OSError(5, "Input/output error"), DecodeError),
    ],
)
def test_what_is_not_the_samples_fault_is_no_decode_error(
    part: str, raised: Exception, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> object:
        raise raised

    monkeypatch.setattr(decoding, "_gunzip", fails)
    monkeypatch.setitem(part_decoder._BY_EXTENSION, "json", fails)
    monkeypatch.setitem(part_decoder._BY_EXTENSION, "npy", fails)
    part_decoder.decoder_for.cache_clear()
    try:
        with pytest.raises(expected):
            SampleDecoder(handlers={"own": fails}).decode(part, b"data")
    finally:
        part_decoder.decoder_for.cache_clear()
