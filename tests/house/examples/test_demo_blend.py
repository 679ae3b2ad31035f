from __future__ import annotations

import dataclasses
import shlex
import tarfile
from itertools import islice
from pathlib import Path

import pytest

from energon_lite import get_loader, get_train_dataset, get_val_dataset
from examples.demo import blend
from examples.demo.blend import DatasetRecipe
from examples.demo.errors import DemoError
from tests.testing import ALONE


def small(recipe: DatasetRecipe, count: int) -> DatasetRecipe:
    """The recipe with its first samples only, in shards of four."""
    splits = {split: list(islice(samples, count)) for split, samples in recipe.splits.items()}
    return dataclasses.replace(recipe, splits=splits, shard_size=4)


@pytest.fixture(scope="module")
def recipes() -> list[DatasetRecipe]:
    return [small(recipe, 10) for recipe in blend.recipes()]


def test_shards_are_byte_for_byte_the_same_each_time(recipes: list[DatasetRecipe], tmp_path: Path) -> None:
    for recipe in recipes:
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


def test_writing_again_replaces_what_was_there(recipes: list[DatasetRecipe], tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "train-009.tar").write_bytes(b"of an older demo")
    blend.write_shards(recipes[0], tmp_path)
    assert not (tmp_path / "digits" / "train-009.tar").exists()


def test_train_and_val_have_no_sample_in_common() -> None:
    for recipe in blend.recipes():
        train, val = ({str(sample["__key__"]) for sample in recipe.splits[split]} for split in ("train", "val"))
        assert train and val and not train & val


def test_the_prepared_blend_loads(recipes: list[DatasetRecipe], tmp_path: Path) -> None:
    for recipe in recipes:
        blend.write_shards(recipe, tmp_path)
        assert "10 samples" in blend.prepare(recipe, tmp_path)
    path = blend.write_blend(tmp_path)
    train = get_train_dataset(
        path, batch_size=1, shuffle_buffer_size=None, max_samples_per_sequence=None, worker_config=ALONE
    )
    keys = [key for batch in islice(get_loader(train), 40) for key in batch.__key__]
    digits, stdlib = ({sample["__key__"] for sample in recipe.splits["train"]} for recipe in recipes)
    # 3 : 1, as the blend says; each of the ten digits three times.
    assert sum(key in digits for key in keys) == 30
    assert sum(key in stdlib for key in keys) == 10
    assert {keys.count(key) for key in digits} == {3}

    val = list(get_loader(get_val_dataset(path, batch_size=4, worker_config=ALONE)))
    read = {key: caption for batch in val for key, caption in zip(batch.__key__, batch.caption, strict=True)}
    assert read == {sample["__key__"]: sample["txt"].decode() for sample in recipes[0].splits["val"]}  # type: ignore
    assert val[0].image.shape == (4, 3, 8, 8)


def test_a_command_that_fails_is_shown_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    recipe = DatasetRecipe("empty", "TextSample", {"text": "txt"}, {"train": []}, shard_size=1)
    with pytest.raises(DemoError) as caught:
        blend.prepare(recipe, tmp_path)
    assert shlex.join(blend.prepare_command(recipe, tmp_path)) in str(caught.value)
    assert "tar" in str(caught.value)
