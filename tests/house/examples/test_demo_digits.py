from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from examples.demo.digits import NAMES, Digit, hold_out, load_digits


@pytest.fixture(scope="module")
def digits() -> list[Digit]:
    return load_digits()


def test_digits_are_those_of_scikit_learn(digits: list[Digit]) -> None:
    from sklearn import datasets

    source = datasets.load_digits()
    assert len(digits) == 1797
    assert [digit.label for digit in digits] == source.target.tolist()
    # 16 grey levels spread over 0..255.
    assert digits[0].pixels.dtype == np.uint8
    assert {int(p) for digit in digits for p in digit.pixels.flat} == {round(level * 255 / 16) for level in range(17)}


def test_captions_name_the_digit() -> None:
    pixels = np.zeros((8, 8), np.uint8)
    captions = [Digit("key", label, pixels).caption for label in (0, 7, 9)]
    assert captions == ["a handwritten zero", "a handwritten seven", "a handwritten nine"]


def test_a_png_holds_the_same_pixels(digits: list[Digit]) -> None:
    with Image.open(io.BytesIO(digits[5].png)) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "L", (8, 8))
        assert np.array_equal(np.asarray(image), digits[5].pixels)


def test_val_is_a_balanced_sixth_without_overlap(digits: list[Digit]) -> None:
    train, val = hold_out(digits)
    assert sorted(d.key for d in [*train, *val]) == [d.key for d in digits]
    assert len(val) == 299
    for label in range(len(NAMES)):
        of_label = sum(d.label == label for d in digits)
        assert sum(d.label == label for d in val) == round(of_label / 6)


def test_the_same_digits_are_held_out_each_time(digits: list[Digit]) -> None:
    _, val = hold_out(digits)
    _, again = hold_out(list(reversed(digits)))
    assert [d.key for d in val] == [d.key for d in reversed(again)]
    # Golden: another choice would make results of different machines incomparable.
    assert [d.key for d in val[:3]] == ["digit-0000", "digit-0006", "digit-0011"]
