"""The same documents, flattened by the installed Megatron-Energon and by us."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from energon_lite.config import load_metadataset

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
