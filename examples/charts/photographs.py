"""Crops of the pictures in scikit-learn and matplotlib. Nothing is downloaded."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from examples.charts.drawing import SIZE

if TYPE_CHECKING:
    from PIL.Image import Image

#: The answer to "What is this picture of?" by the picture's file.
PICTURES = {"china.jpg": "temple", "flower.jpg": "flower", "grace_hopper.jpg": "woman"}
#: Height and width of a crop, as a share of the picture's shorter side.
SHARES = (0.5, 0.9)


@dataclass(frozen=True)
class Crop:
    """A part of a picture.

    Args:
        key: its name in the data set.
        subject: what the picture is of.
        png: the part as a PNG file.
    """

    key: str
    subject: str
    png: bytes


def crops(number: int, *, seed: int) -> Iterator[Crop]:
    """``number`` crops of each picture; the same for a seed."""
    from PIL import Image

    random_ = random.Random(seed)
    for path in _paths():
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
        for count in range(number):
            yield Crop(f"{path.stem}-{count:04d}", PICTURES[path.name], _crop(picture, random_))


def _paths() -> list[Path]:
    import matplotlib
    import sklearn.datasets

    scikit_learn = Path(sklearn.datasets.__file__).parent / "images"
    sample_data = Path(matplotlib.get_data_path()) / "sample_data"
    return [scikit_learn / "china.jpg", scikit_learn / "flower.jpg", sample_data / "grace_hopper.jpg"]


def _crop(picture: Image, random_: random.Random) -> bytes:
    side = round(min(picture.size) * random_.uniform(*SHARES))
    left, top = (random_.randint(0, length - side) for length in picture.size)
    stream = io.BytesIO()
    picture.resize((SIZE, SIZE), box=(left, top, left + side, top + side)).save(stream, format="PNG")
    return stream.getvalue()
