from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import field
from pathlib import Path

import pytest

from energon_lite.config.class_names import TYPED_DATASETS
from energon_lite.config.dataset import DatasetConfig, load_dataset_config, load_own_splits
from energon_lite.errors import ConfigError
from energon_lite.samples import SAMPLE_TYPES, edataclass
from energon_lite.samples import CaptioningSample as OurCaptioningSample
from tests.testing import told_of

WRITTEN_BY_ENERGON = """\
sample_type:
  __module__: megatron.energon
  __class__: CaptioningSample
field_map:
  image: jpg,png
  caption: json[text][0]
subflavors:
  kind: web
  nested: {a: [1, 2.5, null]}
"""

CRUDE_BY_ENERGON = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


def test_standard_as_energon_writes_it(write: Callable[..., Path]) -> None:
    path = write(WRITTEN_BY_ENERGON)
    assert load_dataset_config(path) == DatasetConfig(
        kind="standard",
        sample_type="CaptioningSample",
        field_map={"image": "jpg,png", "caption": "json[text][0]"},
        subflavors={"kind": "web", "nested": {"a": [1, 2.5, None]}},
        origin=str(path),
    )


def test_crude_as_energon_writes_it(write: Callable[..., Path]) -> None:
    path = write(CRUDE_BY_ENERGON)
    assert load_dataset_config(path) == DatasetConfig(kind="crude", origin=str(path))


@pytest.mark.parametrize(
    "spelling",
    [
        "sample_type: CaptioningSample",
        "sample_type: {__class__: CaptioningSample}",
        "sample_type: {__module__: megatron.energon, __class__: CaptioningSample}",
        "sample_type: {__module__: megatron.energon.flavors.captioning, __class__: CaptioningSample}",
        "sample_type: {__module__: energon_lite, __class__: CaptioningSample}",
        "sample_type: {__module__: energon_lite.samples, __class__: CaptioningSample}",
        "__class__: StandardWebdatasetFactory\nsample_type: CaptioningSample",
        "__module__: megatron.energon\n__class__: CaptioningWebdataset",
    ],
)
def test_all_spellings_of_one_sample_type(spelling: str, write: Callable[..., Path]) -> None:
    config = load_dataset_config(write(f"{spelling}\nfield_map: {{image: jpg, caption: txt}}\n"))
    assert (config.kind, config.sample_type) == ("standard", "CaptioningSample")


def test_energons_typed_classes_are_all_known() -> None:
    import megatron.energon

    theirs = {name for name in megatron.energon.__all__ if name.endswith("Webdataset") and name != "CrudeWebdataset"}
    assert theirs <= set(TYPED_DATASETS)
    assert set(TYPED_DATASETS.values()) == set(SAMPLE_TYPES)
    for name in theirs:
        assert getattr(megatron.energon, name).__sample_type__.__name__ == TYPED_DATASETS[name]


def test_optional_fields_may_be_left_out(write: Callable[..., Path]) -> None:
    assert load_dataset_config(write("sample_type: OCRSample\nfield_map: {image: png, text: txt}\n")).field_map
    config = load_dataset_config(
        write("sample_type: OCRSample\nfield_map: {image: png, text: txt, words_text: json}\n")
    )
    assert config.field_map is not None and config.field_map["words_text"] == "json"


def test_part_filter_of_a_crude_data_set(write: Callable[..., Path]) -> None:
    config = load_dataset_config(write("__class__: CrudeWebdataset\npart_filter: [jpg, json]\nsubflavors: {a: b}\n"))
    assert (config.part_filter, config.subflavors) == (["jpg", "json"], {"a": "b"})


def test_empty_optional_keys_are_as_if_they_were_not_there(write: Callable[..., Path]) -> None:
    text = "sample_type: TextSample\nfield_map: {text: txt}\nsubflavors:\nsample_loader: null\npart_filter: ~\n"
    config = load_dataset_config(write(text))
    assert (config.subflavors, config.sample_loader, config.part_filter) == ({}, None, None)


def test_worker_options_of_energon_are_ignored_with_a_note(
    write: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = write(CRUDE_BY_ENERGON + "parallel_shard_iters: 16\nshuffle_over_epochs: -1\n")
    with caplog.at_level(logging.INFO, logger="energon_lite"):
        assert load_dataset_config(path).kind == "crude"
    assert [message.split(" has")[0] for message in told_of(caplog, path)] == [
        f"{path}:3: 'parallel_shard_iters'",
        f"{path}:4: 'shuffle_over_epochs'",
    ]


@pytest.fixture
def own_module(room: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's with a sample type, that leaves a trace when it is imported."""
    (room / "own_samples_for_test.py").write_text(
        "from energon_lite.samples import Sample, edataclass\n"
        "@edataclass\nclass PairSample(Sample):\n    left: str\n    right: str = ''\n"
        "class Other: pass\n"
    )
    monkeypatch.syspath_prepend(room)
    monkeypatch.delitem(sys.modules, "own_samples_for_test", raising=False)
    return "own_samples_for_test"


def own(module: str, name: str, field_map: str = "{left: txt}") -> str:
    return f"sample_type: {{__module__: {module}, __class__: {name}}}\nfield_map: {field_map}\n"


def test_a_sample_type_of_ones_own_needs_trust(own_module: str, write: Callable[..., Path]) -> None:
    path = write(own(own_module, "PairSample"))
    with pytest.raises(ConfigError, match="would have to be imported"):
        load_dataset_config(path)
    assert own_module not in sys.modules
    config = load_dataset_config(path, trust_code=True)
    assert isinstance(config.sample_type, type)
    assert config.sample_type.__name__ == "PairSample"


@pytest.mark.parametrize(
    ("name", "field_map", "message"),
    [
        ("PairSampel", "{left: txt}", "cannot import 'PairSampel'"),
        ("Other", "{left: txt}", "is not a sample type"),
        ("PairSample", "{right: txt}", "leaves out the field 'left' of PairSample"),
        ("PairSample", "{lefd: txt}", "PairSample has no field 'lefd'"),
    ],
)
def test_a_sample_type_of_ones_own_is_checked_as_well(
    name: str, field_map: str, message: str, own_module: str, write: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_dataset_config(write(own(own_module, name, field_map)), trust_code=True)
    assert caught.value.line in (1, 2) and caught.value.fix


def test_missing_config_of_another_name_names_the_nearest(write: Callable[..., Path]) -> None:
    path = write(WRITTEN_BY_ENERGON, "digits/.nv-meta/captions.yaml")
    with pytest.raises(ConfigError) as caught:
        load_dataset_config(path.with_name("caption.yaml"))
    assert caught.value.fix == f"did you mean {str(path)!r}?"


def test_fields_without_defaults_are_the_required_ones(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    @edataclass
    class ExtendedSample(OurCaptioningSample):
        note: str
        extra: str | None = None
        length: int = field(init=False, default=0)

    monkeypatch.setitem(SAMPLE_TYPES, "ExtendedSample", ExtendedSample)
    with pytest.raises(ConfigError, match="leaves out the field 'note'"):
        load_dataset_config(write("sample_type: ExtendedSample\nfield_map: {image: jpg, caption: txt}\n"))
    with pytest.raises(ConfigError, match="has no field 'length'"):
        load_dataset_config(write("sample_type: ExtendedSample\nfield_map: {length: txt}\n"))


def test_splits_of_its_own(write: Callable[..., Path]) -> None:
    assert load_own_splits(write(WRITTEN_BY_ENERGON)) == (None, None)
    path = write(WRITTEN_BY_ENERGON + "split_config: years.yaml\nsplit_part: late\n")
    assert load_own_splits(path) == ("years.yaml", "late")
    assert load_dataset_config(path).sample_type == "CaptioningSample"
    assert load_own_splits(write(WRITTEN_BY_ENERGON + "split_part: null\n")) == (None, None)
    assert load_own_splits(path.parent / "none.yaml") == (None, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("split_config: ../split.yaml", "outside of the data set's .nv-meta folder"),
        ("split_config: [a]", "expected the name of a file in .nv-meta"),
        ("split_part: 7", "expected the name of a split"),
    ],
)
def test_wrong_splits(write: Callable[..., Path], line: str, message: str) -> None:
    path = write(f"{WRITTEN_BY_ENERGON}{line}\n")
    for load in (load_own_splits, load_dataset_config):
        with pytest.raises(ConfigError, match=message):
            load(path)
