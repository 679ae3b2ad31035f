"""Documents of Energon 8: recipes, and tags in place of subflavors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    Cooker,
    Reading,
    TaskEncoder,
    TextSample,
    basic_sample_keys,
    stateless,
)
from energon_lite.config.metadataset import load_metadataset
from energon_lite.errors import UsageError
from tests.testing import CRUDE_YAML, train_loader, val_loader, write_dataset


def recipe(**entry: Any) -> dict[str, Any]:
    top = {"__module__": "megatron.energon", "__class__": "Recipe"}
    return top | {"splits": {name: {"blend": [entry]} for name in ("train", "val")}}


def test_a_recipe_is_a_metadataset(leaf_of: Callable[..., Path]) -> None:
    path = str(leaf_of(13))
    older = recipe(path=path, weight=2) | {"__class__": "MetadatasetV2"}
    assert load_metadataset(recipe(path=path, weight=2), split_part="train") == load_metadataset(
        older, split_part="train"
    )


def test_tags_are_subflavors(leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    inner = tmp_path / "inner.yaml"
    inner.write_text(f"splits: {{val: {{blend: [{{path: {leaf_of(13)}, tags: {{a: 1, b: 1}}}}]}}}}")
    for outer in ({"tags": {"b": 2}}, {"subflavors": {"b": 2}}):
        (sample, *_) = val_loader(recipe(path=str(inner), **outer), reading=Reading(tags={"c": 3}))
        assert sample.__tags__ == sample.__subflavors__ == {"a": 1, "b": 2, "c": 3}
    sample.__tags__ = {"d": 4}
    assert sample.__subflavors__ == {"d": 4}
    with pytest.raises(UsageError, match="both tags and subflavors"):
        val_loader(leaf_of(13), reading=Reading(tags={"a": 1}, subflavors={"a": 1}))
    batch = next(iter(train_loader(leaf_of(13), batch_size=2, reading=Reading(tags={"a": 1}))))
    assert batch.__tags__ == batch.__subflavors__ == [{"a": 1}] * 2


def test_tags_of_a_data_set_choose_its_cooker(tmp_path: Path) -> None:
    def folder(name: str, labels: str) -> Path:
        samples = {"s.tar": [(f"{name}{number}", {"txt": b"text"}) for number in range(3)]}
        return write_dataset(tmp_path / name, samples, dataset_yaml=CRUDE_YAML + labels)

    @stateless
    def cook(sample: Any) -> TextSample:
        return TextSample(**basic_sample_keys(sample), text=f"{sample['__tags__']['kind']} {sample['txt']}")

    @stateless
    def other(sample: Any) -> TextSample:
        return TextSample(**basic_sample_keys(sample), text="other")

    class Encoder(TaskEncoder):
        cookers = (Cooker(cook, has_tags={"kind": "chat"}), Cooker(other))

    blend = [
        {"path": str(folder("a", "tags: {kind: chat}\n"))},
        {"path": str(folder("b", "subflavors: {kind: prose}\n"))},
    ]
    path = {"__class__": "Recipe", "splits": {"val": {"blend": blend}}}
    texts = [sample.text for sample in val_loader(path, task_encoder=Encoder())]
    assert texts == ["chat text"] * 3 + ["other"] * 3
    with pytest.raises(KeyError):
        next(iter(val_loader(tmp_path / "a")))["__no_tags__"]
    with pytest.raises(UsageError, match="both has_tags and"):
        Cooker(cook, has_subflavors={"a": 1}, has_tags={"a": 2})
