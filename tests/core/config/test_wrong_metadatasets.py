"""Wrong metadatasets, each with the place and the cure that its message must name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from wrong_rows import Row, check

from energon_lite.config import load_metadataset
from energon_lite.errors import ConfigError

V2 = "__module__: megatron.energon\n__class__: MetadatasetV2\n"

METADATASETS: dict[str, Row] = {
    "misspelt weight": (
        V2 + "splits:\n  train:\n    blend:\n      - path: digits\n        weigth: 2\n",
        7, 9, "splits.train.blend[0].weigth", "unknown key 'weigth'", "did you mean 'weight'?",
    ),
    "misspelt splits": (
        V2 + "splitz:\n  train: {path: digits}\n",
        3, 1, "splitz", "found 'splitz'", "did you mean 'splits'?",
    ),
    "misspelt blend": (
        "splits:\n  train:\n    bland:\n      - path: digits\n",
        3, 5, "splits.train.bland", "unknown key 'bland'", "did you mean 'blend'?",
    ),
    "misspelt key in another split than the one asked for": (
        "splits:\n  train: {path: digits}\n  val: {path: prose, subflavor: x}\n",
        3, 22, "splits.val.subflavor", "unknown key 'subflavor'", "did you mean 'subflavors'?",
    ),
    "misspelt class": (
        "__module__: megatron.energon\n__class__: MetadatasetV3\nsplits: {}\n",
        2, 12, "__class__", "'MetadatasetV3' is not a metadataset class", "did you mean 'MetadatasetV2'?",
    ),
    "class of another module": (
        "__module__: my_project.data\n__class__: MetadatasetV2\nsplits: {}\n",
        1, 13, "__module__", "found 'my_project.data'", "write '__module__: megatron.energon'",
    ),
    "module without class": (
        "__module__: megatron.energon\nsplits: {train: {path: digits}}\n",
        1, 1, "__module__", "'__module__' without '__class__'", "add '__class__:'",
    ),
    "no splits key": (V2 + "x: 1\n", 3, 1, "x", "unknown key 'x'", "use the keys splits"),
    "only a class": (V2, 1, 1, None, "missing key 'splits'", "add 'splits:' here"),
    "empty splits": (V2 + "splits: {}\n", 3, 9, "splits", "has no splits", "add 'train:'"),
    "no path": (
        "splits:\n  train:\n    blend:\n      - weight: 2\n",
        4, 9, "splits.train.blend[0]", "missing key 'path'", "add 'path:' here",
    ),
    "path is a list": ("splits:\n  train:\n    path: [digits]\n", 3, 11, "splits.train.path", "found a list of 1", ""),
    "path does not exist, one nearly does": (
        "splits:\n  train:\n    path: digts\n",
        3, 11, "splits.train.path", "/digts", "/digits'?",
    ),
    "path does not exist, nothing near": (
        "splits:\n  train:\n    path: sub/qqqq\n",
        3, 11, "splits.train.path", "/sub/qqqq", "holds: photos",
    ),
    "path is a shard": (
        "splits:\n  train:\n    path: digits/shard-000.tar\n",
        3, 11, "splits.train.path", "neither a data set nor a metadataset",
        "name the folder that holds the shards: digits",
    ),
    "path is jsonl that is not there": (
        "splits:\n  train:\n    path: texts.jsonl\n",
        3, 11, "splits.train.path", "a JSONL file (.jsonl)", "correct the path",
    ),
    "path is empty": ("splits:\n  train:\n    path: ''\n", 3, 11, "splits.train.path", "expected the path", ""),
    "weight zero": (
        "splits:\n  train:\n    blend: [{path: digits, weight: 0}]\n",
        3, 36, "splits.train.blend[0].weight", "must be above zero", "remove the entry",
    ),
    "weight negative": (
        "splits:\n  train:\n    blend: [{path: digits, weight: -1.5}]\n",
        3, 36, "splits.train.blend[0].weight", "found the number -1.5", "write a number above 0",
    ),
    "weight nan": (
        "splits:\n  train:\n    blend: [{path: digits, weight: .nan}]\n",
        3, 36, "splits.train.blend[0].weight", "expected a finite number", "",
    ),
    "weight inf": (
        "splits:\n  train:\n    blend: [{path: digits, weight: .inf}]\n",
        3, 36, "splits.train.blend[0].weight", "expected a finite number", "",
    ),
    "weight is a truth value": (
        "splits:\n  train:\n    blend: [{path: digits, weight: yes}]\n",
        3, 36, "splits.train.blend[0].weight", "found the truth value true", "",
    ),
    "weight in quotes": (
        "splits:\n  train:\n    blend: [{path: digits, weight: '2'}]\n",
        3, 36, "splits.train.blend[0].weight", "expected a number; found text '2'", "remove the quotes",
    ),
    "weight null": (
        "splits:\n  train:\n    blend:\n    - path: digits\n      weight:\n",
        5, 14, "splits.train.blend[0].weight", "found nothing (null)", "",
    ),
    "weight without a blend": (
        "splits:\n  train: {path: digits, weight: 2}\n",
        2, 25, "splits.train.weight", "'weight' outside of a blend", "write 'blend:'",
    ),
    "empty blend": (
        "splits:\n  train:\n    blend: []\n",
        3, 12, "splits.train.blend", "the blend is empty", "add '- path: ...'",
    ),
    "blend without a list": (
        "splits:\n  train:\n    blend:\n      path: digits\n",
        4, 7, "splits.train.blend", "expected a list", "after '- '",
    ),
    "blend inside of a blend": (
        "splits:\n  train:\n    blend:\n      - blend: [{path: digits}]\n",
        4, 9, "splits.train.blend[0].blend", "'blend' inside of a blend", "metadataset file of its own",
    ),
    "path and blend": (
        "splits:\n  train:\n    path: digits\n    blend: []\n",
        4, 5, "splits.train.blend", "'path' and 'blend' in one split", "keep one of them",
    ),
    "repetitions in a blend": (
        "splits:\n  train:\n    blend: [{path: digits, repetitions: 2}]\n",
        3, 28, "splits.train.blend[0].repetitions", "belongs to blend_epochized", "use 'weight'",
    ),
    "repetitions zero": (
        V2 + "splits:\n  train:\n    blend_epochized:\n      - {path: digits, repetitions: 0}\n",
        6, 37, "splits.train.blend_epochized[0].repetitions", "the number of repetitions must be above zero",
        "remove the entry",
    ),
    "repetitions negative": (
        V2 + "splits:\n  train:\n    blend_epochized:\n      - {path: digits, repetitions: -1}\n",
        6, 37, "splits.train.blend_epochized[0].repetitions", "found the number -1", "write a number above 0",
    ),
    "repetitions nan": (
        "splits:\n  train:\n    blend_epochized: [{path: digits, repetitions: .nan}]\n",
        3, 51, "splits.train.blend_epochized[0].repetitions", "expected a finite number", "",
    ),
    "repetitions in quotes": (
        "splits:\n  train:\n    blend_epochized: [{path: digits, repetitions: '1.5'}]\n",
        3, 51, "splits.train.blend_epochized[0].repetitions", "expected a number; found text '1.5'",
        "remove the quotes",
    ),
    "repetitions null": (
        "splits:\n  train:\n    blend_epochized: [{path: digits, repetitions: }]\n",
        3, 51, "splits.train.blend_epochized[0].repetitions", "found nothing (null)", "",
    ),
    "repetitions is a truth value": (
        "splits:\n  train:\n    blend_epochized: [{path: digits, repetitions: yes}]\n",
        3, 51, "splits.train.blend_epochized[0].repetitions", "found the truth value true", "",
    ),
    "repetitions misspelt": (
        "splits:\n  train:\n    blend_epochized: [{path: digits, repetition: 2}]\n",
        3, 38, "splits.train.blend_epochized[0].repetition", "unknown key 'repetition'", "did you mean 'repetitions'?",
    ),
    "weight in a blend_epochized": (
        "splits:\n  train:\n    blend_epochized: [{path: digits, weight: 2}]\n",
        3, 38, "splits.train.blend_epochized[0].weight", "'weight' belongs to blend", "use 'repetitions'",
    ),
    "repetitions without a blend": (
        "splits:\n  train: {path: digits, repetitions: 2}\n",
        2, 25, "splits.train.repetitions", "'repetitions' outside of a blend", "write 'blend_epochized:'",
    ),
    "repetitions in version 1": (
        "splits:\n  train:\n    datasets: [{path: digits, repetitions: 2}]\n",
        3, 31, "splits.train.datasets[0].repetitions", "unknown key 'repetitions'", "",
    ),
    "empty blend_epochized": (
        "splits:\n  train:\n    blend_epochized: []\n",
        3, 22, "splits.train.blend_epochized", "the blend is empty", "add '- path: ...'",
    ),
    "blend and blend_epochized": (
        "splits:\n  train:\n    blend: [{path: digits}]\n    blend_epochized: [{path: digits}]\n",
        4, 5, "splits.train.blend_epochized", "'blend' and 'blend_epochized' in one split", "keep one of them",
    ),
    "blend inside of a blend_epochized": (
        "splits:\n  train:\n    blend_epochized:\n      - blend: [{path: digits}]\n",
        4, 9, "splits.train.blend_epochized[0].blend", "'blend' inside of a blend", "metadataset file of its own",
    ),
    "unknown key beside blend_epochized": (
        "splits:\n  train:\n    subste: {range: [0, 1]}\n    blend_epochized: [{path: digits}]\n",
        3, 5, "splits.train.subste", "unknown key 'subste'", "did you mean 'subset'?",
    ),
    "weights below repetitions": (
        "splits:\n  other: {blend: [{path: digits}]}\n  train:\n    blend_epochized:\n"
        "      - {path: doc.yaml, split_part: other}\n",
        2, 11, "splits.other.blend", "doc.yaml:5: weights and repetitions do not go together",
        "same kind of blend",
    ),
    "subset is a list": (
        "splits:\n  train:\n    path: digits\n    subset: [0%, 50%]\n",
        4, 13, "splits.train.subset", "expected a mapping with the key range; found a list of 2", "",
    ),
    "subset without a range": (
        "splits:\n  train:\n    path: digits\n    subset: {from: 0%}\n",
        4, 14, "splits.train.subset.from", "unknown key 'from'", "use the key range",
    ),
    "range of one": (
        "splits:\n  train:\n    path: digits\n    subset: {range: [50%]}\n",
        4, 21, "splits.train.subset.range", "a range has a start and an end", "write 'range: [start, end]'",
    ),
    "range is a text": (
        "splits:\n  train:\n    path: digits\n    subset: {range: 0%-50%}\n",
        4, 21, "splits.train.subset.range", "expected a list of two", "write a list",
    ),
    "range from its end": (
        "splits:\n  train:\n    path: digits\n    subset: {range: [end, 10]}\n",
        4, 22, "splits.train.subset.range[0]", "cannot start at its end", "write 0 or 0%",
    ),
    "range of a percentage and a number": (
        "splits:\n  train:\n    path: digits\n    subset: {range: [10%, 50]}\n",
        4, 27, "splits.train.subset.range[1]", "expected a percentage; found the number 50", "percentages for both",
    ),
    "range of a number and a percentage": (
        "splits:\n  train:\n    path: digits\n    subset: {range: [10, 50%]}\n",
        4, 26, "splits.train.subset.range[1]", "expected a sample's number, or end", "numbers for both",
    ),
    "range of a percentage to end": (
        "splits:\n  train:\n    path: digits\n    subset: {range: [10%, end]}\n",
        4, 27, "splits.train.subset.range[1]", "a percentage and a sample's number", "write '100%'",
    ),
    "range backwards": (
        "splits:\n  train:\n    path: digits\n    subset: {range: [50%, 10%]}\n",
        4, 21, "splits.train.subset.range", "ends before it starts", "exchange the two",
    ),
    "range backwards by number": (
        "splits:\n  train:\n    path: digits\n    subset: {range: [50, 10]}\n",
        4, 21, "splits.train.subset.range", "found [50, 10]", "exchange the two",
    ),
    "range of nothing": (
        "splits:\n  train:\n    path: digits\n    subset: {range: [50%, 50%]}\n",
        4, 21, "splits.train.subset.range", "the range is empty", "remove the entry",
    ),
    "percentage above 100": (
        "splits:\n  train:\n    path: digits\n    subset: {range: [50%, 150%]}\n",
        4, 27, "splits.train.subset.range[1]", "a percentage is above 100", "write at most 100%",
    ),
    "percentage below 0": (
        "splits:\n  train:\n    path: digits\n    subset: {range: [-5%, 50%]}\n",
        4, 22, "splits.train.subset.range[0]", "found text '-5%'", "write it like 25%",
    ),
    "percentage that is none": (
        "splits:\n  train:\n    path: digits\n    subset: {range: [nan%, 50%]}\n",
        4, 22, "splits.train.subset.range[0]", "found text 'nan%'", "write it like 25%",
    ),
    "percentage without its sign": (
        "splits:\n  train:\n    path: digits\n    subset: {range: ['5', 50%]}\n",
        4, 22, "splits.train.subset.range[0]", "found text '5'", "remove the quotes, or add %",
    ),
    "ratio instead of a percentage": (
        "splits:\n  train:\n    path: digits\n    subset: {range: [0.25, 50%]}\n",
        4, 22, "splits.train.subset.range[0]", "found the number 0.25", "write '25%'",
    ),
    "sample number below zero": (
        "splits:\n  train:\n    path: digits\n    subset: {range: [-5, end]}\n",
        4, 22, "splits.train.subset.range[0]", "below zero", "count from the start",
    ),
    "range of a truth value": (
        "splits:\n  train:\n    path: digits\n    subset: {range: [no, 50%]}\n",
        4, 22, "splits.train.subset.range[0]", "found the truth value false", "",
    ),
    "sample numbers for a blend": (
        "splits:\n  train:\n    blend: [{path: digits}]\n    subset: {range: [0, 5]}\n",
        4, 5, "splits.train.subset", "only allowed for a leaf dataset", "use percentages here",
    ),
    "sample numbers for a blend_epochized": (
        "splits:\n  train:\n    blend_epochized: [{path: digits}]\n    subset: {range: [0, end]}\n",
        4, 5, "splits.train.subset", "found the range [0, end]", "use percentages here",
    ),
    "subset in version 1": (
        "splits:\n  train:\n    datasets: [{path: digits, subset: {range: [0%, 5%]}}]\n",
        3, 31, "splits.train.datasets[0].subset", "unknown key 'subset'", "",
    ),
    "aux of nothing": (
        V2 + "splits:\n  train:\n    blend:\n      - path: digits\n        aux: {images: pros}\n",
        7, 23, "splits.train.blend[0].aux.images", "the path does not exist", "'",
    ),
    "aux that is no path": (
        V2 + "splits:\n  train:\n    blend:\n      - path: digits\n        aux: {images: 7}\n",
        7, 23, "splits.train.blend[0].aux.images", "expected a data set's folder or URL", "quotes",
    ),
    "chained aux": (
        V2 + "splits:\n  train:\n    blend:\n      - path: digits\n        aux: {images: 'simplecache::s3://b/a'}\n",
        7, 23, "splits.train.blend[0].aux.images", "chained URLs are not read", "one store",
    ),
    "aux in version 1": (
        "splits:\n  train:\n    datasets: [{path: digits, aux: {images: prose}}]\n",
        3, 31, "splits.train.datasets[0].aux", "unknown key 'aux'", "",
    ),
    "datasets in version 2": (
        V2 + "splits:\n  train:\n    datasets: [{path: digits}]\n",
        5, 5, "splits.train.datasets", "key of the older Metadataset", "rename 'datasets' to 'blend'",
    ),
    "blend in version 1": (
        "__module__: megatron.energon\n__class__: Metadataset\nsplits:\n  train:\n    blend: [{path: digits}]\n",
        5, 5, "splits.train.blend", "'blend' is a key of MetadatasetV2", "write '__class__: MetadatasetV2'",
    ),
    "split without content": ("splits:\n  train:\n", 2, 9, "splits.train", "found nothing (null)", ""),
    "split without a data set": (
        "splits:\n  train: {split_part: train}\n",
        2, 10, "splits.train", "the split says no data set", "add 'path:'",
    ),
    "subflavors is a list": (
        "splits:\n  train:\n    path: digits\n    subflavors: [a, b]\n",
        4, 17, "splits.train.subflavors", "expected a mapping", "",
    ),
    "split_part is a number": (
        "splits:\n  train:\n    path: digits\n    split_part: 1\n",
        4, 17, "splits.train.split_part", "expected the name of a split", "put it into quotes",
    ),
    "multiplier zero": (
        "splits:\n  train:\n    path: digits\n    shuffle_over_epochs_multiplier: 0\n",
        4, 37, "splits.train.shuffle_over_epochs_multiplier", "out of range", "remove it",
    ),
    "multiplier is a fraction": (
        "splits:\n  train:\n    path: digits\n    shuffle_over_epochs_multiplier: 1.5\n",
        4, 37, "splits.train.shuffle_over_epochs_multiplier", "expected a whole number", "",
    ),
    "dataset_config for a metadataset": (
        "splits:\n  train:\n    path: good.yaml\n    dataset_config: x.yaml\n",
        4, 5, "splits.train.dataset_config", "this path is a metadataset", "remove it here",
    ),
    "split asked for is missing": (
        "splits:\n  trian: {path: digits}\n",
        2, 3, "splits", "no split 'train'", "did you mean 'trian'?",
    ),
    "cycle": (
        "splits:\n  train:\n    path: doc.yaml\n",
        3, 11, "splits.train.path", "doc.yaml (train) -> doc.yaml (train)", "remove one of these references",
    ),
    "key twice": (
        "splits:\n  train: {path: digits}\n  train: {path: prose}\n",
        3, 3, "splits.train", "the key 'train' stands twice", "remove one of the lines 2 and 3",
    ),
    "tab": ("splits:\n\ttrain: {path: digits}\n", 2, 1, None, "not valid YAML", "indent with spaces"),
    "bracket left open": ("splits: {train: {path: digits}\n", 2, 1, None, "not valid YAML", "close the bracket"),
    "colon in a value": ("splits:\n  train: path: digits\n", 2, 14, None, "not valid YAML", "into quotes"),
    "quote left open": ("splits:\n  train: {path: 'digits}\n", 3, 1, None, "not valid YAML", "close the quotes"),
    "two documents": ("splits: {}\n---\nsplits: {}\n", 2, 1, None, "not valid YAML", "one document per file"),
    "unknown alias": ("splits: *other\n", 1, 9, None, "not valid YAML", "define the anchor"),
    "merge key": (
        "base: &b {path: digits}\nsplits:\n  train:\n    <<: *b\n",
        4, 5, 'splits.train["<<"]', "merge keys (<<) are not supported", "write the entries out",
    ),
    "object tag": (
        "splits: !!python/object/apply:os.getcwd []\n",
        1, 9, "splits", "tags that make objects are not allowed", "remove the tag",
    ),
    "alias to itself": (
        "splits: &s\n  train: *s\n",
        1, 9, "splits.train", "something that contains it", "write the value out",
    ),
    "a list as the key": ("splits:\n  [a]: 1\n", 2, 3, "splits", "a key is not text", "use text as the key"),
    "list at the top": ("- path: digits\n", 1, 1, None, "expected a mapping; found a list of 1", ""),
    "empty": ("# nothing\n", 1, 1, None, "the document is empty", "write the configuration into it"),
}  # fmt: skip


@pytest.mark.parametrize("row", METADATASETS.values(), ids=METADATASETS.keys())
def test_wrong_metadataset(row: Row, write: Callable[..., Path]) -> None:
    path = write(row[0])
    with pytest.raises(ConfigError) as caught:
        load_metadataset(path, split_part="train")
    check(caught.value, path, row)
