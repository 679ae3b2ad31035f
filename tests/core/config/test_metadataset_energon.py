"""The same documents, flattened by the installed Megatron-Energon and by us."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite.config.metadataset import load_metadataset
from energon_lite.errors import ConfigError

OUTER_V2 = """\
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
      - {path: digits, weight: 3, subflavors: {kind: image, level: 0}}
      - {path: inner_v2.yaml, weight: 1.5, subflavors: {level: outer}}
      - {path: ./inner_v1.yaml, split_part: other, weight: 1e-1, subflavors: {on: yes, n: 010, t: 1:30}}
      - {path: sub/photos, split_part: val}
  val: {path: inner_v2.yaml, split_part: train}
"""

INNER_V2 = """\
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
      - {path: prose, weight: 7, subflavors: {level: inner, more: [1, 2.5, null]}}
      - {path: inner_v1.yaml, weight: 2}
"""

INNER_V1 = """\
splits:
  train:
    datasets:
      - {path: digits, weight: 0.25}
      - {path: prose, split_part: val, subflavors: {old: true}}
  other:
    datasets: [{path: sub/photos, subflavor: legacy}]
"""


@pytest.fixture
def documents(room: Path, write: Callable[..., Path]) -> Path:
    for name in ("digits", "prose", "sub/photos"):
        write(json.dumps({"energon_version": "7.4.1", "shard_counts": {"a.tar": 4}}), f"{name}/.nv-meta/.info.json")
        write("__module__: megatron.energon\n__class__: CrudeWebdataset\n", f"{name}/.nv-meta/dataset.yaml")
        splits = "split_parts: {train: [a.tar], val: [a.tar], other: [a.tar]}\nexclude: []\n"
        write(splits, f"{name}/.nv-meta/split.yaml")
    write(INNER_V2, "inner_v2.yaml")
    write(INNER_V1, "inner_v1.yaml")
    return write(OUTER_V2, "outer.yaml")


@pytest.mark.filterwarnings("ignore:subflavor is deprecated")
@pytest.mark.parametrize("split_part", ["train", "val"])
def test_paths_splits_and_subflavors_are_energons(documents: Path, split_part: str) -> None:
    from megatron.energon import traverse_metadataset

    theirs = [
        (str(leaf.path), leaf.split_part, leaf.subflavors)
        for leaf in traverse_metadataset(documents, split_part=split_part)
    ]
    ours = [
        (leaf.path, leaf.split_part, leaf.subflavors) for leaf in load_metadataset(documents, split_part=split_part)
    ]
    assert ours == theirs
    assert len(ours) >= 3


@pytest.mark.filterwarnings("ignore:subflavor is deprecated")
def test_weights_are_energons(documents: Path) -> None:
    from megatron.energon import WorkerConfig, load_dataset

    loaded = load_dataset(documents).get_datasets(
        training=True, split_part="train", worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0)
    )
    leaves = load_metadataset(documents, split_part="train")
    assert [leaf.path for leaf in leaves] == [str(one.dataset.path) for one in loaded.datasets]
    assert [leaf.weight for leaf in leaves] == pytest.approx([one.weight for one in loaded.datasets], rel=1e-12)


EPOCHS = """\
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend_epochized:
      - {path: digits, repetitions: 3, subset: {range: [1, end]}}
      - {path: epochs_inner.yaml, repetitions: 0.5, subset: {range: [25%, 75%]}}
      - {path: sub/photos}
    subset: {range: [0%, 50%]}
  val: {path: digits, subset: {range: [0%, 50%]}}
  mixed:
    blend: [{path: digits, split_part: train}, {path: epochs_inner.yaml, split_part: train}]
"""

EPOCHS_INNER = """\
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend_epochized: [{path: prose, repetitions: 1.5}, {path: single.yaml, repetitions: 4}]
    subset: {range: [50%, 100%]}
"""

SINGLE = """\
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train: {path: digits, subset: {range: [0%, 50%]}}
"""


@pytest.fixture
def epochs(documents: Path, write: Callable[..., Path]) -> Path:
    write(SINGLE, "single.yaml")
    write(EPOCHS_INNER, "epochs_inner.yaml")
    return write(EPOCHS, "epochs.yaml")


def energon_leaves(path: Path, split_part: str) -> Any:
    from megatron.energon import WorkerConfig, load_dataset

    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    return load_dataset(path).get_datasets(training=True, split_part=split_part, worker_config=config).datasets


@pytest.mark.parametrize(("split_part", "count"), [("train", 4), ("val", 1)])
def test_repetitions_and_subsets_are_energons(epochs: Path, split_part: str, count: int) -> None:
    theirs = energon_leaves(epochs, split_part)
    ours = load_metadataset(epochs, split_part=split_part)
    assert len(ours) == count
    assert [leaf.path for leaf in ours] == [str(one.dataset.path) for one in theirs]
    assert [leaf.repetitions for leaf in ours] == [one.repetitions for one in theirs]
    for leaf, one in zip(ours, theirs, strict=True):
        assert leaf.subset is not None
        for samples in (4, 7, 100, 1000):
            assert leaf.subset.bounds(samples) == one.dataset.subset.compute_subset(samples)


def test_mixtures_are_refused_by_both(epochs: Path) -> None:
    with pytest.raises(ValueError, match="Cannot mix blend with blend_epochized"):
        energon_leaves(epochs, "mixed")
    with pytest.raises(ConfigError, match="do not go together in one tree"):
        load_metadataset(epochs, split_part="mixed")
