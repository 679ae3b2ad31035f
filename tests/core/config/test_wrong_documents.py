"""Wrong descriptions of data sets and their splits, each with the place and the cure that its message must name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from wrong_rows import Row, check

from energon_lite.config import load_dataset_config, load_split_config
from energon_lite.errors import ConfigError, TrustError

CAPTIONING = "sample_type: {__module__: megatron.energon, __class__: CaptioningSample}\n"

DATASETS: dict[str, Row] = {
    "unknown key": (
        CAPTIONING + "field_map: {image: jpg, caption: txt}\nsubflavour: {a: 1}\n",
        3, 1, "subflavour", "unknown key 'subflavour'", "did you mean 'subflavors'?",
    ),
    "misspelt field_map": (
        CAPTIONING + "field_mapp: {image: jpg, caption: txt}\n",
        2, 1, "field_mapp", "unknown key 'field_mapp'", "did you mean 'field_map'?",
    ),
    "misspelt sample type": (
        "sample_type:\n  __module__: megatron.energon\n  __class__: CaptioningSampel\nfield_map: {image: jpg}\n",
        3, 14, "sample_type.__class__", "unknown class 'CaptioningSampel'", "did you mean 'CaptioningSample'?",
    ),
    "sample type is a data set class": (
        "sample_type: {__module__: megatron.energon, __class__: CrudeWebdataset}\nfield_map: {image: jpg}\n",
        1, 56, "sample_type.__class__", "CrudeWebdataset does not belong here", "without sample_type",
    ),
    "sample type is a typed data set class": (
        "sample_type: {__module__: megatron.energon, __class__: OCRWebdataset}\nfield_map: {image: jpg}\n",
        1, 56, "sample_type.__class__", "OCRWebdataset does not belong here", "move it to the top",
    ),
    "sample type as the data set class": (
        "__module__: megatron.energon\n__class__: CaptioningSample\nfield_map: {image: jpg, caption: txt}\n",
        2, 12, "__class__", "is a sample type, not a data set", "write 'sample_type: CaptioningSample'",
    ),
    "metadataset as the data set class": (
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {}\n",
        2, 12, "__class__", "this is a metadataset", "give the path of this file",
    ),
    "misspelt data set class": (
        "__module__: megatron.energon\n__class__: CrudeWebdatset\n",
        2, 12, "__class__", "unknown class 'CrudeWebdatset'", "did you mean 'CrudeWebdataset'?",
    ),
    "data set class that is not supported": (
        "__module__: megatron.energon\n__class__: JoinedWebdatasetFactory\n",
        2, 12, "__class__", "JoinedWebdatasetFactory is a base for classes", "use one of these",
    ),
    "no sample type": (
        "field_map: {image: jpg, caption: txt}\n",
        1, 1, None, "missing key 'sample_type'", "add 'sample_type:' here",
    ),
    "sample type twice": (
        "__module__: megatron.energon\n__class__: OCRWebdataset\n"
        "sample_type: OCRSample\nfield_map: {image: jpg, text: txt}\n",
        3, 1, "sample_type", "already says the sample type", "remove '__module__' and '__class__'",
    ),
    "no field map": (
        CAPTIONING,
        1, 1, None, "neither 'field_map' nor 'sample_loader'", "{image: <part>, caption: <part>}",
    ),
    "field map and sample loader": (
        CAPTIONING + "field_map: {image: jpg, caption: txt}\nsample_loader: sample_loader.py\n",
        3, 1, "sample_loader", "both 'field_map' and 'sample_loader'", "remove one of them",
    ),
    "field map of another type": (
        CAPTIONING + "field_map:\n  image: jpg\n  captoin: txt\n",
        4, 3, "field_map.captoin", "CaptioningSample has no field 'captoin'", "did you mean 'caption'?",
    ),
    "field map with a base field": (
        CAPTIONING + "field_map:\n  __key__: txt\n",
        3, 3, "field_map.__key__", "has no field '__key__'", "map the fields of this sample type",
    ),
    "field map leaves one out": (
        CAPTIONING + "field_map:\n  image: jpg\n",
        2, 1, "field_map", "leaves out the field 'caption'", "add 'caption: <part>'",
    ),
    "field map with a list": (
        CAPTIONING + "field_map:\n  image: [jpg, png]\n  caption: txt\n",
        3, 10, "field_map.image", "found a list of 2", '"jpg,png"',
    ),
    "field map is text": (
        CAPTIONING + "field_map: jpg\n",
        2, 12, "field_map", "expected a mapping; found text 'jpg'", "",
    ),
    "part filter beside a field map": (
        CAPTIONING + "field_map: {image: jpg, caption: txt}\npart_filter: [jpg]\n",
        3, 1, "part_filter", "which already says the parts", "remove part_filter",
    ),
    "field map of a crude data set": (
        "__class__: CrudeWebdataset\nfield_map: {image: jpg}\n",
        2, 1, "field_map", "does not go with CrudeWebdataset", "remove it",
    ),
    "decoder option of older versions": (
        CAPTIONING + "field_map: {image: jpg, caption: txt}\nimage_decode: pil\n",
        3, 1, "image_decode", "does not belong into dataset.yaml", "decoder = SampleDecoder(...)",
    ),
    "part filter with a number": (
        "__class__: CrudeWebdataset\npart_filter: [jpg, 3]\n",
        2, 20, "part_filter[1]", "expected the name of a part", "put it into quotes",
    ),
    "sample type is a number": ("sample_type: 3\n", 1, 14, "sample_type", "expected the name of a sample type", ""),
}  # fmt: skip

UNTRUSTED: dict[str, Row] = {
    "sample type of another module": (
        "sample_type:\n  __module__: os\n  __class__: system\nfield_map: {image: jpg}\n",
        2, 15, "sample_type.__module__", "found 'os'", "trust_code=True",
    ),
    "sample type of a module that looks like Energon's": (
        "sample_type: {__module__: megatron.energon_evil, __class__: CaptioningSample}\nfield_map: {image: jpg}\n",
        1, 27, "sample_type.__module__", "of another module", "did you mean 'megatron.energon'?",
    ),
    "data set class of another module": (
        "__module__: my.project\n__class__: CrudeWebdataset\n",
        1, 13, "__module__", "found 'my.project'", "StandardWebdatasetFactory with a sample_type",
    ),
    "sample loader": (
        CAPTIONING + "sample_loader: sample_loader.py\npart_filter: [jpg]\n",
        2, 16, "sample_loader", "names Python code", "trust_code=True",
    ),
    "part filter as code": (
        "__class__: CrudeWebdataset\npart_filter: sample_loader.py:part_filter\n",
        2, 14, "part_filter", "names Python code", "write the parts as a list",
    ),
}  # fmt: skip

SPLITS: dict[str, Row] = {
    "misspelt key": (
        "split_part: {train: [a.tar]}\n",
        1, 1, "split_part", "unknown key", "did you mean 'split_parts'?",
    ),
    "no split_parts": ("exclude: []\n", 1, 1, None, "missing key 'split_parts'", "add 'split_parts:' here"),
    "a split without a list": (
        "split_parts:\n  train: a.tar\n",
        2, 10, "split_parts.train", "expected a list of shards", "after '- '",
    ),
    "a shard that is a number": (
        "split_parts:\n  train: [7]\n",
        2, 11, "split_parts.train[0]", "expected the name of a shard", "put it into quotes",
    ),
    "a brace left open": (
        "split_parts:\n  train:\n    - 'a{000..003.tar'\n",
        3, 7, "split_parts.train[0]", "braces of the pattern do not match", "close the brace",
    ),
    "a shard twice": (
        "split_parts:\n  train:\n    - 'a{0..3}.tar'\n    - a2.tar\n",
        4, 7, "split_parts.train[1]", "'a2.tar' stands twice", "remove one of them",
    ),
    "exclude is text": ("split_parts: {}\nexclude: a.tar\n", 2, 10, "exclude", "expected a list", "after '- '"),
}  # fmt: skip


@pytest.mark.parametrize("row", DATASETS.values(), ids=DATASETS.keys())
@pytest.mark.parametrize("trust_code", [False, True])
def test_wrong_dataset(row: Row, trust_code: bool, write: Callable[..., Path]) -> None:
    path = write(row[0])
    with pytest.raises(ConfigError) as caught:
        load_dataset_config(path, trust_code=trust_code)
    check(caught.value, path, row)
    assert not isinstance(caught.value, TrustError), "trusting would not have helped"


@pytest.mark.parametrize("row", UNTRUSTED.values(), ids=UNTRUSTED.keys())
def test_untrusted_dataset(row: Row, write: Callable[..., Path]) -> None:
    path = write(row[0])
    with pytest.raises(TrustError) as caught:
        load_dataset_config(path)
    check(caught.value, path, row)


@pytest.mark.parametrize("row", SPLITS.values(), ids=SPLITS.keys())
def test_wrong_split(row: Row, write: Callable[..., Path]) -> None:
    path = write(row[0])
    with pytest.raises(ConfigError) as caught:
        load_split_config(path)
    check(caught.value, path, row)
