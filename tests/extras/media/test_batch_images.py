"""Images that are decoded where their batch goes: the same crops and nearly the same pixels by any decoder."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from energon_lite import TaskEncoder
from energon_lite.errors import DecodeError, UsageError
from energon_lite.extras.media import BatchImageDecoder, EncodedImages, batch_images
from energon_lite.hooks.hooks import attributes
from energon_lite.loading.executors.transport import pack, unpack
from energon_lite.storage import ImageSize, RandomCrop, SampleDecoder, decode_to_size
from energon_lite.tensors import map_tensors
from tests.testing import examples, take, train_loader, write_dataset


def picture(height: int, width: int, seed: int = 0, kind: str = "jpeg", mode: str = "RGB", **more: Any) -> bytes:
    """A smooth picture, as photographs are."""
    rows, columns = np.mgrid[:height, :width] / 64.0
    waves = [128 + 100 * np.sin(rows * (1 + c) + columns * (3 - c) + seed) for c in range(3)]
    file = io.BytesIO()
    Image.fromarray(np.stack(waves, axis=-1).astype(np.uint8)).convert(mode).save(file, kind, **more)
    return file.getvalue()


def full_decoder(images: Sequence[Any]) -> list[torch.Tensor | None]:
    """What a GPU's decoder does: whole JPEGs, RGB; None for all else."""
    made: list[torch.Tensor | None] = []
    for image in images:
        try:
            whole = Image.open(io.BytesIO(image.tobytes()), formats=["JPEG"]).convert("RGB")
            made.append(torch.from_numpy(np.array(whole)).permute(2, 0, 1))
        except Exception:
            made.append(None)
    return made


def both(target: Any) -> list[BatchImageDecoder]:
    """By the processor, and as on a GPU."""
    decoders = [BatchImageDecoder(target) for _ in range(2)]
    decoders[1]._backend = full_decoder
    return decoders


@given(parts=st.lists(st.binary(max_size=50), max_size=6))
def test_they_travel_in_one_buffer_and_stay_where_they_are(parts: list[bytes]) -> None:
    images = EncodedImages(parts)
    assert [bytes(one) for one in images] == parts and images.offsets.tolist()[-1] == sum(map(len, parts))
    message = pack({"images": images})
    again = unpack(memoryview(bytearray(b"".join(message))))["images"]
    assert type(again) is EncodedImages and [bytes(one) for one in again] == parts
    assert np.array_equal(again.data, images.data) and all(
        np.shares_memory(one, again.data) for one in again if one.size
    )
    moved: dict[str, Any] = map_tensors(lambda tensor: tensor.to("meta"), {"images": images, "x": torch.ones(1)})
    assert moved["images"] is images and moved["x"].is_meta
    assert [bytes(one) for one in pickle.loads(pickle.dumps(images))] == parts
    assert type(images)() == ()


@settings(max_examples=examples(60))
@given(
    sizes=st.lists(st.tuples(st.integers(40, 300), st.integers(40, 300)), min_size=1, max_size=4),
    target=st.sampled_from([ImageSize(32), ImageSize(48, 24, "bilinear"), RandomCrop(32)]),
    kind=st.sampled_from(["jpeg", "png"]),
    mode=st.sampled_from(["RGB", "L"]),
    seed=st.integers(0, 9),
)
def test_any_decoder_makes_the_same_crops_and_nearly_the_same_pixels(
    sizes: list[tuple[int, int]], target: Any, kind: str, mode: str, seed: int
) -> None:
    images = EncodedImages([picture(*size, seed, kind, mode) for size in sizes])
    plain, other = both(target)
    one = plain(images, np.random.default_rng(seed))
    two = other(images, np.random.default_rng(seed))
    assert one.shape == two.shape == (len(sizes), 3, target.height, target.width or target.height)
    assert one.dtype == two.dtype == torch.uint8
    assert (one.float() - two.float()).abs().mean() <= 1.3
    assert other.by_processor == (len(sizes) if kind == "png" else 0) and plain.by_processor == 0


def test_sharp_edges_stay_black_and_white() -> None:
    """Bicubic weights overshoot beside an edge, below black and above white."""
    file = io.BytesIO()
    Image.fromarray(np.repeat(np.uint8([0, 255, 0]), 16)[None, :, None].repeat(48, 0).repeat(3, 2)).save(file, "jpeg")
    images = EncodedImages([file.getvalue()])
    one, two = (decoder(images) for decoder in both(ImageSize(40)))
    assert (one.float() - two.float()).abs().max() <= 40


def test_by_the_processor_they_are_what_a_hook_would_make() -> None:
    images = [picture(100, 80, number) for number in range(3)]
    expected = torch.stack([decode_to_size(image, ImageSize(32)) for image in images])
    assert torch.equal(BatchImageDecoder(ImageSize(32))(EncodedImages(images)), expected)
    scaled = BatchImageDecoder(ImageSize(32), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))(images)
    wanted = expected.float() / 255 - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)
    assert torch.allclose(scaled, wanted / torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1), atol=1e-5)
    short = BatchImageDecoder(ImageSize(32), mean=[0] * 3, std=[1] * 3, dtype=torch.bfloat16)
    assert short(images).dtype is torch.bfloat16


def test_crops_are_drawn_for_each_image() -> None:
    same = EncodedImages([picture(200, 300)] * 4)
    for decoder in both(RandomCrop(16)):
        first, again, other = (decoder(same, np.random.default_rng(seed)) for seed in (1, 1, 2))
        assert torch.equal(first, again) and not torch.equal(first, other)
        assert len({bytes(one.numpy()) for one in first}) == 4


def test_no_images() -> None:
    for decoder in both(ImageSize(8, 9)):
        assert decoder(EncodedImages()).shape == (0, 3, 8, 9)


def test_damaged_ones(caplog: pytest.LogCaptureFixture) -> None:
    images = EncodedImages([picture(40, 40), b"nonsense", picture(40, 40, 1)[:60]])
    for decoder in both(ImageSize(16)):
        with pytest.raises(DecodeError, match="image 1 of the batch"):
            decoder(images)
        decoder.damaged = "black"
        made = decoder(images)
        assert made[0].any() and not made[1:].any() and decoder.blackened == 2
    assert caplog.text.count("is made black") == 2, "once for each decoder"


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="one of mean and std"):
        BatchImageDecoder(ImageSize(8), mean=(0, 0, 0))
    with pytest.raises(UsageError, match="RandomCrop draws random numbers"):
        BatchImageDecoder(RandomCrop(8))([picture(40, 40)])


def test_the_first_decoder_that_works_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent(device: torch.device) -> Any:
        raise ModuleNotFoundError("No module named 'absent'")

    def broken(device: torch.device) -> Any:
        raise OSError("libnvrtc.so.13: cannot open shared object file")

    decoder = BatchImageDecoder(ImageSize(16))
    monkeypatch.setattr(batch_images, "BACKENDS", {"absent": absent, "broken": broken})
    assert decoder.opened(torch.device("cuda:0")) == "the processor"
    (said,) = [record.getMessage() for record in caplog.records if record.name == batch_images.__name__]
    assert "absent: No module" in said and "broken: libnvrtc" in said
    caplog.clear()
    monkeypatch.setattr(batch_images, "BACKENDS", {"absent": absent, "works": lambda device: ("1.2", full_decoder)})
    assert decoder.opened(torch.device("cuda:0")) == decoder.name == "works 1.2" and not caplog.text
    again = pickle.loads(pickle.dumps(decoder))
    assert again.name == "the processor" and again([picture(40, 40)]).shape == (1, 3, 16, 16)
    assert decoder.opened(torch.device("cpu")) == "the processor" and not caplog.text


class Pictures(TaskEncoder):
    decoder = SampleDecoder(image_decode=None)
    device_decoder = BatchImageDecoder(RandomCrop(16))

    def encode_batch(self, batch: Any) -> Any:
        return {"images": EncodedImages(batch.image), "text": list(batch.caption)}

    def encode_on_device(self, batch: Any) -> Any:
        return {**batch, "pixels": self.device_decoder(batch["images"], self.rng)}


def test_a_run_with_workers_is_one_without(tmp_path: Any) -> None:
    samples = [(f"{number}", {"jpg": picture(50 + number, 60, number), "txt": b"a"}) for number in range(12)]
    yaml = "{sample_type: CaptioningSample, field_map: {image: jpg, caption: txt}}"
    path = write_dataset(tmp_path / "set", {"0.tar": samples}, dataset_yaml=yaml)
    found = []
    for workers in (0, 2):
        with train_loader(path, workers, batch_size=4, task_encoder=Pictures()).to("cpu") as loader:
            found.append([batch["pixels"] for batch in take(loader, 5)])
            state = loader.save_state_rank()
            assert state is not None and state["device_decoder"] == "the processor"
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True)) and found[0][0].any()


def test_an_encoder_is_the_same_after_its_decoder_was_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers and stores of samples compare the encoder of a trainer, which may have moved to a GPU."""
    monkeypatch.setattr(batch_images, "BACKENDS", {"works": lambda device: ("1.2", full_decoder)})
    encoder = Pictures()
    encoder.device_decoder = BatchImageDecoder(ImageSize(16))
    before = [*attributes(encoder, "self")]
    encoder.device_decoder.opened(torch.device("cuda:0"))
    assert encoder.device_decoder.name == "works 1.2" and [*attributes(encoder, "self")] == before


def turned_picture() -> bytes:
    turned = Image.Exif()
    turned[0x0112] = 6
    return picture(40, 60, exif=turned)


IMAGES = [picture(40, 60), b"nonsense", picture(40, 60, mode="L"), turned_picture(), picture(40, 60, kind="png")]


def _check_decoded(found: Sequence[torch.Tensor | None], missing: list[int]) -> None:
    assert [place for place, pixels in enumerate(found) if pixels is None] == missing
    for image, pixels in zip(IMAGES, found, strict=True):
        if pixels is not None:
            full = decode_to_size(image, ImageSize(40, 60))
            assert pixels.shape == (3, 40, 60) and (pixels.float() - full.float()).abs().mean() < 1


def test_nvimagecodec_by_its_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    nvimgcodec = pytest.importorskip("nvidia.nvimgcodec")
    made = nvimgcodec.Decoder

    class Decoder:  # its pixels are in the processor's memory, from where a GPU's way to torch does not lead
        def __init__(self, device_id: int):
            backends = [nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)]
            self.own = made(device_id=-99999, backends=backends)

        def decode(self, images: Any, **more: Any) -> list[Any]:
            return [None if one is None else np.asarray(one) for one in self.own.decode(images, **more)]

    monkeypatch.setattr(nvimgcodec, "Decoder", Decoder)
    version, decode = batch_images.BACKENDS["nvImageCodec"](torch.device("cpu"))
    assert version
    _check_decoded(decode(EncodedImages(IMAGES)), [1])


def test_torchcodec_decodes_jpegs_together_and_alone_if_one_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of torchcodec, a function with the signature and the errors that its documentation states."""
    calls = []

    def decode_jpeg(sources: list[torch.Tensor], *, mode: str, device: torch.device) -> list[torch.Tensor]:
        calls.append(len(sources))
        assert mode == "RGB" and all(not Image.open(io.BytesIO(one.numpy().tobytes())).getexif() for one in sources)
        found = full_decoder([one.numpy() for one in sources])
        if None in [one if one is None else 0 for one in found]:
            raise RuntimeError("Failed to decode")
        return found

    monkeypatch.setitem(sys.modules, "torchcodec", SimpleNamespace(__version__="0.17"))
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", SimpleNamespace(decode_jpeg=decode_jpeg))
    version, decode = batch_images.BACKENDS["torchcodec"](torch.device("cpu"))
    images = EncodedImages(IMAGES)
    _check_decoded(decode(images), [1, 4])
    assert version == "0.17" and calls == [3]
    cut = EncodedImages([*IMAGES[:4], IMAGES[0][:-200]])
    assert [place for place, pixels in enumerate(decode(cut)) if pixels is None] == [1, 4]
    assert decode(EncodedImages([b"nonsense"])) == [None]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; pytest -m gpu")
@pytest.mark.parametrize("package", ["nvImageCodec", "torchcodec"])
def test_a_decoder_of_the_gpu_is_near_the_processors(package: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        _, backend = batch_images.BACKENDS[package](device)
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"{package}: {error}")
    decoder, plain = (BatchImageDecoder(ImageSize(32), damaged="black") for _ in range(2))
    decoder._backend, decoder._device = backend, device
    made, expected = decoder(EncodedImages(IMAGES)), plain(IMAGES)
    assert made.is_cuda and made.shape == expected.shape
    assert (made.cpu().float() - expected.float()).abs().mean() <= 2
