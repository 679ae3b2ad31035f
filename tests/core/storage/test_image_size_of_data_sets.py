"""The size of images in documents of data sets, and in batches."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from energon_lite import ImageSample, TaskEncoder, get_savable_loader, get_val_dataset
from energon_lite.errors import ConfigError
from energon_lite.storage import ImageSize, RandomCrop, SampleDecoder, decode_to_size
from tests.core.storage.test_decoding import saved
from tests.testing import alone, write_dataset

YAML = """\
__module__: megatron.energon
__class__: StandardWebdatasetFactory
sample_type: {__module__: megatron.energon, __class__: ImageSample}
field_map: {image: jpg}
"""


@cache
def stored(number: int) -> bytes:
    """A smooth image of 120 x 160, as JPEG."""
    coarse = np.random.default_rng(number).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return saved(Image.fromarray(coarse).resize((160, 120), Image.Resampling.BICUBIC).save, "JPEG")


def images(path: Path, size: str) -> Path:
    """A data set of 12 images of 120 x 160."""
    samples = [(f"{n:02d}", {"jpg": stored(n)}) for n in range(12)]
    return write_dataset(path, {"a.tar": samples}, dataset_yaml=YAML + size)


class Bytes(TaskEncoder):
    decoder = SampleDecoder(image_decode="torchrgb8", image_size=ImageSize(16))


class Crops(TaskEncoder):
    decoder = SampleDecoder(image_decode=None)

    def encode_sample(self, sample: Any) -> Any:
        return ImageSample.derive_from(sample, image=decode_to_size(sample.image, RandomCrop(24), self.rng))


def batches_of(path: Path, encoder: TaskEncoder, workers: int = 0) -> list[Any]:
    dataset = get_val_dataset(path, worker_config=alone(workers), batch_size=4, task_encoder=encoder)
    with get_savable_loader(dataset) as loader:
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
    batches = batches_of(images(tmp_path / "flowers", size), Bytes())
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
    with pytest.raises(ConfigError, match=rf"{message}[\s\S]*dataset\.yaml:5"):
        batches_of(images(tmp_path / "flowers", size), Crops() if "stay bytes" in message else Bytes())


def test_crops_depend_on_the_sample_alone(tmp_path: Path) -> None:
    path = images(tmp_path / "flowers", "")
    alike = [torch.cat(batches_of(path, Crops(), workers)) for workers in (0, 2)]
    assert alike[0].shape == (12, 3, 24, 24) and torch.equal(*alike)
    assert not torch.equal(alike[0][0], decode_to_size(stored(0), ImageSize(24)))
