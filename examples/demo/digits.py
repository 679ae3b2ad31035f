"""Handwritten digits with captions: scikit-learn's 1,797 grey images of 8 x 8 pixels, divided into train and val."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
#: One digit in this many is held out.
HELD_OUT = 6
#: Grey levels of the original run from 0 (paper) to this (ink).
_INK = 16


@dataclass(frozen=True)
class Digit:
    """One handwritten digit.

    Args:
        key: its name in the data set.
        label: 0..9.
        pixels: uint8 ``[8, 8]``, 255 is ink.
    """

    key: str
    label: int
    pixels: np.ndarray

    @property
    def caption(self) -> str:
        """The caption that a model should generate."""
        return f"a handwritten {NAMES[self.label]}"

    @property
    def png(self) -> bytes:
        """The image as a PNG file."""
        from PIL import Image

        stream = io.BytesIO()
        Image.fromarray(self.pixels).save(stream, format="PNG")
        return stream.getvalue()


def load_digits() -> list[Digit]:
    """All digits, in the order in which scikit-learn has them. Nothing is downloaded: they come with the package."""
    from sklearn import datasets

    source = datasets.load_digits()
    grey = np.rint(source.images * (255 / _INK)).astype(np.uint8)
    return [
        Digit(f"digit-{number:04d}", int(label), pixels)
        for number, (label, pixels) in enumerate(zip(source.target, grey, strict=True))
    ]


def hold_out(digits: Sequence[Digit]) -> tuple[list[Digit], list[Digit]]:
    """Divide digits into (train, val); both keep their order.

    Of each label, the sixth whose keys have the smallest hashes is held out. So val is as balanced as the whole, looks
    random, and is the same on every machine and for every version of Python.
    """
    held: set[str] = set()
    for label in range(len(NAMES)):
        keys = sorted((digit.key for digit in digits if digit.label == label), key=_hash)
        held.update(keys[: round(len(keys) / HELD_OUT)])
    return [d for d in digits if d.key not in held], [d for d in digits if d.key in held]


def _hash(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=8).digest()
