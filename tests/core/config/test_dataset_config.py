from __future__ import annotations

import logging
from dataclasses import field

import pytest

from energon_lite.config.class_names import TYPED_DATASETS
from energon_lite.config.dataset import DatasetConfig, load_dataset_config, load_own_splits
from energon_lite.errors import ConfigError
from energon_lite.samples import SAMPLE_TYPES, Sample, edataclass
from energon_lite.samples import CaptioningSample as OurCaptioningSample
from tests.core.config.conftest import Write
from tests.testing import CRUDE_YAML, told_of

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


def test_standard_as_energon_writes_it(write: Write) -> None:
    path = write(WRITTEN_BY_ENERGON)
    assert load_dataset_config(path) == DatasetConfig(
        kind="standard",
        sample_type="CaptioningSample",
        field_map={"image": "jpg,png", "caption": "json[text][0]"},
        subflavors={"kind": "web", "nested": {"a": [1, 2.5, None]}},
        origin=str(path),
    )


def test_crude_as_energon_writes_it(write: Write) -> None:
    path = write(CRUDE_YAML)
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
def test_all_spellings_of_one_sample_type(spelling: str, write: Write) -> None:
    config = load_dataset_config(write(f"{spelling}\nfield_map: {{image: jpg, caption: txt}}\n"))
    assert (config.kind, config.sample_type) == ("standard", "CaptioningSample")


def test_energons_typed_classes_are_all_known() -> None:
    import megatron.energon

    theirs = {name for name in megatron.energon.__all__ if name.endswith("Webdataset") and name != "CrudeWebdataset"}
    assert theirs <= set(TYPED_DATASETS)
    assert set(TYPED_DATASETS.values()) == set(SAMPLE_TYPES)
    for name in theirs:
        assert getattr(megatron.energon, name).__sample_type__.__name__ == TYPED_DATASETS[name]


def test_part_filter_of_a_crude_data_set(write: Write) -> None:
    config = load_dataset_config(write("__class__: CrudeWebdataset\npart_filter: [jpg, json]\nsubflavors: {a: b}\n"))
    assert (config.part_filter, config.subflavors) == (["jpg", "json"], {"a": "b"})


def test_empty_optional_keys_are_as_if_they_were_not_there(write: Write) -> None:
    text = "sample_type: TextSample\nfield_map: {text: txt}\nsubflavors:\nsample_loader: null\npart_filter: ~\n"
    config = load_dataset_config(write(text))
    assert (config.subflavors, config.sample_loader, config.part_filter) == ({}, None, None)


def test_worker_options_of_energon_are_ignored_with_a_note(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    path = write(CRUDE_YAML + "parallel_shard_iters: 16\nshuffle_over_epochs: -1\n")
    with caplog.at_level(logging.INFO, logger="energon_lite"):
        assert load_dataset_config(path).kind == "crude"
    assert [message.split(" has")[0] for message in told_of(caplog, path)] == [
        f"{path}:3: 'parallel_shard_iters'",
        f"{path}:4: 'shuffle_over_epochs'",
    ]


@edataclass
class PairSample(Sample):
    """Named by wrong/trusted.yaml, too."""

    left: str
    right: str = ""


def test_a_sample_type_of_ones_own(write: Write) -> None:
    text = f"sample_type: {{__module__: {__name__}, __class__: PairSample}}\nfield_map: {{left: txt}}\n"
    assert load_dataset_config(write(text), trust_code=True).sample_type is PairSample


def test_missing_config_of_another_name_names_the_nearest(write: Write) -> None:
    path = write(WRITTEN_BY_ENERGON, "digits/.nv-meta/captions.yaml")
    with pytest.raises(ConfigError) as caught:
        load_dataset_config(path.with_name("caption.yaml"))
    assert caught.value.fix == f"did you mean {str(path)!r}?"


def test_fields_without_defaults_are_the_required_ones(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_splits_of_its_own(write: Write) -> None:
    assert load_own_splits(write(WRITTEN_BY_ENERGON)) == (None, None)
    path = write(WRITTEN_BY_ENERGON + "split_config: years.yaml\nsplit_part: late\n")
    assert load_own_splits(path) == ("years.yaml", "late")
    assert load_dataset_config(path).sample_type == "CaptioningSample"
    assert load_own_splits(write(WRITTEN_BY_ENERGON + "split_part: null\n")) == (None, None)
    assert load_own_splits(path.parent / "none.yaml") == (None, None)
