"""The same subsets, read by the installed Megatron-Energon and by us: the same keys in the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

V2 = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}

INNER = "inner.yaml"


def reference(start: Any, stop: Any, path: str = "data", **options: Any) -> dict[str, Any]:
    return {"path": path, "subset": {"range": [start, stop]}, **options}


#: Name: (the split of the outer document, the split of the inner one).
DOCUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "percentages": (reference("20%", "70%"), {}),
    "percentages that end inside of a shard": (reference("13.7%", "66.6%"), {}),
    "where floating point is a hair below": (reference("0%", "58%"), {}),
    "numbers": (reference(2, 11), {}),
    "from a number to the end": (reference(4, "end"), {}),
    "percentages of numbers": (reference("50%", "100%", INNER), reference(3, 13)),
    "percentages of percentages": (reference("10%", "90%", INNER), reference("20%", "80%")),
    "of a blend": (
        {"blend": [reference("0%", "40%", weight=2), {"path": "data"}], "subset": {"range": ["50%", "100%"]}},
        {},
    ),
    "of a blend by repetitions": (
        {"blend_epochized": [reference(1, 9, repetitions=2), {"path": "data"}], "subset": {"range": ["25%", "75%"]}},
        {},
    ),
    "of a nested blend": (
        {"blend": [reference("0%", "50%", INNER), reference("80%", "100%")]},
        {"blend": [reference("20%", "100%"), reference(0, 12)], "subset": {"range": ["10%", "100%"]}},
    ),
    "with another split": (reference("0%", "50%", split_part="train"), {}),
}


SAMPLES = ["train/part-000.tar/deep.er/long/0001", "x.0.tar/deep.er/long/0013"]


def compare(shards: Path, tools: Any, name: str, exclude: list[str]) -> list[str]:
    tools.lite_prepare(
        shards, "--split-ratio", "5,0,0", "--sample-type", "TextSample", "--field-map", '{"text": "txt"}'
    )
    names = ["train/part-002.tar", "train/part-000.tar", "held/out.tar", "x.0.tar", "train/part-001.tar"]
    split_parts = {"val": names, "train": names[::-1]}
    tools.write_meta(shards, "split.yaml", {"split_parts": split_parts, "exclude": exclude})
    for file, split in zip(("outer.yaml", INNER), DOCUMENTS[name], strict=True):
        (shards.parent / file).write_text(yaml.safe_dump(V2 | {"splits": {"val": split or {"path": "data"}}}))
    ours = tools.lite_samples(shards.parent / "outer.yaml", "val")
    tools.assert_same(ours, tools.energon_samples(shards.parent / "outer.yaml", "val"))
    return [sample["text"] for sample in ours]


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("exclude", [[], SAMPLES], ids=["all", "without some samples"])
def test_the_same_samples(shards: Path, tools: Any, name: str, exclude: list[str]) -> None:
    assert compare(shards, tools, name, exclude)


def test_bounds_count_excluded_samples_but_no_excluded_shards(shards: Path, tools: Any) -> None:
    # 12 samples are left in 4 shards: 6 7 8, 0 (1) 2, 9 10 11, 12 (13) 14
    texts = compare(shards, tools, "of a blend", ["train/part-001.tar", *SAMPLES])
    assert [text.split()[1] for text in texts] == ["8", "0", "9", "10", "11", "12", "14"]
