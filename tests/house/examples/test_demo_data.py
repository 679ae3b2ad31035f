"""Data of the demo: the same each time, whole, and with nothing in val that is in train."""

from __future__ import annotations

import dataclasses
import io
import shlex
import tarfile
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.demo import blend, source_text
from examples.demo.blend import DatasetRecipe
from examples.demo.digits import NAMES, Digit, hold_out, load_digits
from examples.demo.errors import DemoError
from examples.demo.source_text import Piece, cut, library_modules


def small(recipe: DatasetRecipe, count: int) -> DatasetRecipe:
    """The recipe with its first samples only, in shards of four."""
    splits = {split: list(islice(samples, count)) for split, samples in recipe.splits.items()}
    return dataclasses.replace(recipe, splits=splits, shard_size=4)


@pytest.fixture(scope="module")
def recipes() -> list[DatasetRecipe]:
    return [small(recipe, 10) for recipe in blend.recipes()]


def test_shards_are_byte_for_byte_the_same_each_time(recipes: list[DatasetRecipe], tmp_path: Path) -> None:
    for recipe in recipes:
        (tmp_path / "one" / recipe.name).mkdir(parents=True)
        (tmp_path / "one" / recipe.name / "train-009.tar").write_bytes(b"of an older demo, which is replaced")
        for folder in ("one", "two"):
            assert blend.write_shards(recipe, tmp_path / folder) == {"train": 10, "val": 10}
        names = sorted(path.name for path in (tmp_path / "one" / recipe.name).iterdir())
        assert names == [f"{split}-{n:03d}.tar" for split in ("train", "val") for n in range(3)]
        for name in names:
            one, two = (tmp_path / folder / recipe.name / name for folder in ("one", "two"))
            assert one.read_bytes() == two.read_bytes()
            with tarfile.open(one) as tar:
                # Both were written within a second, so equal bytes alone do not show that the clock has no part in it.
                assert {member.mtime for member in tar} == {0}


def test_shards_hold_the_samples_in_order(recipes: list[DatasetRecipe], tmp_path: Path) -> None:
    digits = recipes[0]
    blend.write_shards(digits, tmp_path)
    with tarfile.open(tmp_path / "digits" / "train-001.tar") as tar:
        found = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    expected = {
        f"{sample['__key__']}.{part}": sample[part] for sample in digits.splits["train"][4:8] for part in ("png", "txt")
    }
    assert found == expected


def test_train_and_val_have_no_sample_in_common() -> None:
    for recipe in blend.recipes():
        train, val = ({str(sample["__key__"]) for sample in recipe.splits[split]} for split in ("train", "val"))
        assert train and val and not train & val


def test_a_command_that_fails_is_shown_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    recipe = DatasetRecipe("empty", "TextSample", {"text": "txt"}, {"train": []}, shard_size=1)
    with pytest.raises(DemoError) as caught:
        blend.prepare(recipe, tmp_path)
    assert shlex.join(blend.prepare_command(recipe, tmp_path)) in str(caught.value)
    assert "tar" in str(caught.value)


# -- digits ------------------------------------------------------------------------------------------------------------


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


# -- source text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "given", "pieces"),
    [
        # Seven characters a line: the third takes a piece over 20.
        ("line n\n" * 10, {"size": 20, "most": 99}, [*["line n\n" * 3] * 3, "line n\n"]),
        ("abc\n" * 10, {"size": 7, "most": 2}, ["abc\nabc\n"] * 2),
        ("abcdef\n\n\n", {"size": 5}, ["abcdef\n"]),
        ("# coding: latin-1\n# é\n", {}, ["# coding: latin-1\n# é\n"]),
    ],
    ids=["whole lines", "of a long module the first", "a rest of blank lines is none", "in the declared coding"],
)
def test_pieces_of_a_module(tmp_path: Path, text: str, given: dict[str, int], pieces: list[str]) -> None:
    module = tmp_path / "mod.py"
    module.write_bytes(text.encode("latin-1"))
    assert list(cut([module], **given)) == [Piece(f"mod-{number:03}", piece) for number, piece in enumerate(pieces)]


def test_whole_modules_are_held_out() -> None:
    modules = [Path(f"{name}.py") for name in "abcdefghijklm"]
    train, val = source_text.hold_out(modules)
    assert [path.stem for path in val] == ["f", "l"]
    assert sorted([*train, *val]) == modules


def test_the_library_gives_a_few_thousand_pieces_with_keys_of_their_own() -> None:
    modules = library_modules()
    assert modules == sorted(modules)
    assert {"abc", "argparse", "typing"} <= {module.stem for module in modules}
    assert not any(module.stem.startswith("_") for module in modules)
    train, val = ([piece.key for piece in cut(part)] for part in source_text.hold_out(modules))
    assert 2000 < len(train) < 8000
    assert len(val) > 300
    assert len({*train, *val}) == len(train) + len(val)
