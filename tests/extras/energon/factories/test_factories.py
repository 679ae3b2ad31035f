"""Data sets as objects: what a dataset.yaml names, a class of one's own, metadatasets that are looked into."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import energon_lite
from energon_lite import (
    Sample,
    TextSample,
    edataclass,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
)
from energon_lite.errors import ConfigError, NotPreparedError, TrustError, UsageError
from energon_lite.extras.energon import (
    CrudeJsonlDatasetFactory,
    CrudeWebdataset,
    DefaultDecoderWebdatasetFactory,
    JoinedWebdatasetFactory,
    MapDataset,
    MetadatasetV2,
    StandardWebdatasetFactory,
    TextWebdataset,
    build_filter_index,
    load_dataset,
    prepare_metadataset,
    traverse_metadataset,
)
from energon_lite.extras.energon.factories.kinds import (
    EnergonDatasetType,
    MetadatasetNode,
    WebdatasetMeta,
    get_dataset_type,
)
from energon_lite.extras.energon.factories.loaders import DatasetBlendMode, DatasetSubset, get_dataset_from_config
from energon_lite.storage.read import source as sources
from tests.testing import ALONE, take


@edataclass
class Shout(Sample):
    text: str


class ShoutWebdataset(DefaultDecoderWebdatasetFactory[Shout]):
    """As users write them: with a sample type, and a say in how it is made."""

    __sample_type__ = Shout

    def __init__(self, path: Any, *, marks: int = 1, **kwargs: Any):
        super().__init__(path, **kwargs)
        self.marks = marks

    def load_sample(self, sample: Any) -> Shout:
        made: Shout = super().load_sample(sample)
        made.text = made.text.upper() + "!" * self.marks
        return made


@pytest.fixture
def shouting(monkeypatch: pytest.MonkeyPatch, write_dataset: Callable[..., Path], tmp_path: Path) -> Path:
    module = types.ModuleType("shouts")
    module.ShoutWebdataset, module.Other = ShoutWebdataset, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shouts", module)
    document = "__module__: shouts\n__class__: ShoutWebdataset\nfield_map: {text: txt}\nmarks: 2\n"
    shard = [(f"k{number}", {"txt": f"text {number}".encode()}) for number in range(6)]
    return write_dataset(tmp_path / "shouts", {"0.tar": shard}, dataset_yaml=document)


def texts(dataset: Any) -> list[str]:
    with get_loader(dataset) as loader:
        return [sample.text for sample in loader]


def test_a_class_of_ones_own(shouting: Path) -> None:
    dataset = get_val_dataset(shouting, worker_config=ALONE, trust_code=True, subflavors={"run": 7})
    with get_savable_loader(dataset) as loader:
        samples = list(loader)
        assert [sample.text for sample in samples] == [f"TEXT {number}!!" for number in range(6)]
        assert samples[3].__subflavors__ == {"run": 7} and samples[3].__sources__[0].index == 3
        assert loader.restore_sample(samples[2].__restore_key__) == samples[2]
    with pytest.raises(TrustError, match="shouts"):
        get_val_dataset(shouting, worker_config=ALONE)
    (shouting / ".nv-meta" / "dataset.yaml").write_text("__module__: shouts\n__class__: Other\n")
    with pytest.raises(ConfigError, match="not a data set class"):
        get_val_dataset(shouting, worker_config=ALONE, trust_code=True)
    (shouting / ".nv-meta" / "dataset.yaml").write_text("__module__: shouts\n__class__: Absent\n")
    with pytest.raises(ConfigError, match="cannot import 'Absent'"):
        get_val_dataset(shouting, worker_config=ALONE, trust_code=True)


def test_it_can_be_built_by_hand(shouting: Path) -> None:
    factory = ShoutWebdataset(shouting, field_map={"text": "txt"}, split_part="val", worker_config=ALONE)
    assert len(factory) == 6 and texts(factory.build())[0] == "TEXT 0!" and str(factory.paths[0]) == str(shouting)
    trained = ShoutWebdataset(
        shouting, field_map={"text": "txt"}, split_part="train", worker_config=ALONE, training=True
    )
    with get_loader(MapDataset(trained.build(), lambda sample: sample.text)) as loader:
        found = take(loader, 12)
    assert sorted(found[:6]) == sorted(found[6:]) == [f"TEXT {number}!" for number in range(6)]
    with pytest.raises(UsageError, match="field_map and sample_loader"):
        ShoutWebdataset(shouting)


def test_what_a_document_means(leaf_of: Callable[..., Path]) -> None:
    path = leaf_of(5)
    factory = get_dataset_from_config(path, worker_config=ALONE, training=False, split_part="val")
    assert isinstance(factory, StandardWebdatasetFactory) and factory.__sample_type__ is TextSample
    assert texts(factory.build()) == [f"a-{number}" for number in range(5)]
    with pytest.raises(UsageError, match="not CaptioningSample"):
        get_dataset_from_config(path, worker_config=ALONE, sample_type=energon_lite.CaptioningSample)
    crude = CrudeWebdataset(path, split_part="val", worker_config=ALONE, part_filter=["txt"])
    with get_loader(crude.build()) as loader:
        assert [sample["txt"] for sample in loader] == [f"a-{number}" for number in range(5)]
    with pytest.warns(DeprecationWarning, match="sample_type: TextSample"):
        typed = TextWebdataset(path, field_map={"text": "txt"}, split_part="val", worker_config=ALONE)
    half = StandardWebdatasetFactory(
        path, sample_type=TextSample, field_map={"text": "txt"}, subset=DatasetSubset(absolute_range=(1, 3))
    )
    assert texts(typed.build())[1:3] == texts(half.build()) == ["a-1", "a-2"]
    with pytest.raises(UsageError, match="join"):
        JoinedWebdatasetFactory([half], joiner=TextSample)


def test_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 0}\n{"n": 1}\n')
    assert CrudeJsonlDatasetFactory.prepare_dataset(tmp_path / "a.jsonl") == 2
    assert (tmp_path / "a.jsonl.idx").is_file()
    with pytest.raises(NotPreparedError):
        CrudeJsonlDatasetFactory.prepare_dataset(tmp_path / "absent.jsonl")
    factory = CrudeJsonlDatasetFactory(tmp_path / "a.jsonl", training=False, worker_config=ALONE)
    with get_loader(factory.build()) as loader:
        assert [sample["json"]["n"] for sample in loader] == [0, 1]
    found = load_dataset(tmp_path / "a.jsonl").get_datasets(training=False, split_part="x", worker_config=ALONE)
    assert (
        len(found.datasets) == 1 and found.blend_mode is DatasetBlendMode.NONE and len(found.datasets[0].dataset) == 2
    )


def test_metadatasets_are_looked_into(leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    a, b = leaf_of(5, "a"), leaf_of(6, "b")
    blend = MetadatasetNode(blend=[MetadatasetNode(path=a, weight=3), MetadatasetNode(path=b, weight=1, subset=None)])
    document = MetadatasetV2(tmp_path / "blend.yaml", splits={"train": blend})
    assert [spec.weight for spec in document.specs("train")] == [0.75, 0.25]
    (tmp_path / "in.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend_epochized:\n"
        f"      - {{path: {a}, repetitions: 2, subflavors: {{k: 1}}}}\n      - {{path: {b}, repetitions: 0.5}}\n"
    )
    (tmp_path / "out.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\n"
        "splits:\n  train: {path: in.yaml, subflavors: {k: 2}}\n"
    )
    found = traverse_metadataset(tmp_path / "out.yaml", split_part="train")
    assert [(str(one.path), one.split_part, one.subflavors) for one in found] == [
        (str(a), "train", {"k": 2}),
        (str(b), "train", {"k": 2}),
    ]
    loaded = load_dataset(tmp_path / "out.yaml").get_datasets(
        training=True, split_part="train", worker_config=ALONE, subset=DatasetSubset(range=(0, 0.5))
    )
    assert loaded.blend_mode is DatasetBlendMode.SAMPLE_REPETITIONS
    assert [(one.repetitions, one.weight, len(one.dataset)) for one in loaded.datasets] == [
        (2, None, 2),
        (0.5, None, 3),
    ]
    prepare_metadataset(tmp_path / "out.yaml")
    with pytest.raises(UsageError, match="not a metadataset"):
        traverse_metadataset(a, split_part="train")
    (tmp_path / "empty.yaml").write_text("__class__: MetadatasetV2\n__module__: megatron.energon\n")
    with pytest.raises(ConfigError, match="splits"):
        prepare_metadataset(tmp_path / "empty.yaml")


def test_kinds(leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    for name in ("a.yaml", "a.jsonl", "a.txt"):
        (tmp_path / name).write_text("\n")
    kinds = [get_dataset_type(tmp_path / name).name for name in ("a.yaml", "a.jsonl", "a.txt", "absent")]
    assert kinds == ["METADATASET", "JSONL", "INVALID", "INVALID"]
    path = leaf_of(5)
    assert get_dataset_type(path) is EnergonDatasetType.WEBDATASET
    meta = WebdatasetMeta.from_config(path, split_part="train")
    assert sum(shard.count for shard in meta.shards) == 5 and not meta.sample_excludes
    assert meta.split_part_files == meta.info_shard_files


@pytest.mark.parametrize("kind", ["tar", "jsonl"])
def test_filters_hold_for_factories(leaf_of: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    path = leaf_of(6)
    if kind == "jsonl":
        path = tmp_path / "six.jsonl"
        path.write_text("".join(f'{{"n": {n}}}\n' for n in range(6)))
    build_filter_index(path, "odd", [1, 3, 5])
    (tmp_path / "odd.yaml").write_text(
        f"{{__module__: megatron.energon, __class__: Recipe, splits: {{train: {{path: {path}, filter: odd}}}}}}"
    )
    loaded = load_dataset(tmp_path / "odd.yaml").get_datasets(training=False, split_part="train", worker_config=ALONE)
    by_name = get_dataset_from_config(path, split_part="train", training=False, worker_config=ALONE, filter_name="odd")
    for factory in (loaded.datasets[0].dataset, by_name):
        with get_loader(factory.build()) as loader:
            found = [sample["json"]["n"] if kind == "jsonl" else int(sample.text[2:]) for sample in loader]
        assert len(factory) == 3 and found == [1, 3, 5]


def test_leaves_of_validation_have_paths(leaf_of: Callable[..., Path]) -> None:
    ((_, source),) = get_val_datasets(leaf_of(5), worker_config=ALONE, batch_size=2)
    assert source.paths == [str(leaf_of(5))]


def test_keywords_that_say_how_to_decode(leaf_of: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    encoder = energon_lite.DefaultTaskEncoder()
    dataset = get_train_dataset(
        leaf_of(5), worker_config=ALONE, batch_size=2, task_encoder=encoder, image_decode="pil", av_decode=None
    )
    assert dataset.task_encoder.decoder.image_decode == "pil" and encoder.decoder.image_decode == "torchrgb"
    assert "image_decode=...) is deprecated" in caplog.text
    raw = get_val_dataset(leaf_of(5), worker_config=ALONE, batch_size=2, auto_decode=False)
    assert next(iter(get_loader(raw))).text == [b"a-0", b"a-1"]


class Numbers:
    """A source of a user's."""

    identity = "numbers"

    def __len__(self) -> int:
        return 4

    def read(self, index: int) -> dict[str, Any]:
        return {"n": index}


def test_sources_of_ones_own_have_factories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_registered", {})
    energon_lite.register_source("numbers", lambda url, split_part: Numbers())
    document = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    document["splits"] = {"train": {"path": "numbers://x", "subflavors": {"k": 1}}}  # type: ignore[assignment]
    (loaded,) = load_dataset(document).get_datasets(training=False, split_part="train", worker_config=ALONE).datasets
    with get_loader(loaded.dataset.build()) as loader:
        assert [sample["n"] for sample in loader] == [0, 1, 2, 3]
    assert len(loaded.dataset) == 4 and loaded.dataset.subflavors == {"k": 1}
    assert [one.name for one in loaded.dataset.paths] == ["x"]


def test_weights_are_what_the_documents_say(leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    head = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    inner = {"blend": [{"path": str(leaf_of(5, "a")), "weight": 1}, {"path": str(leaf_of(6, "b")), "weight": 1}]}
    (tmp_path / "in.yaml").write_text(json.dumps({**head, "splits": {"train": inner, "val": inner}}))
    outer = {"blend": [{"path": "in.yaml", "weight": 4}, {"path": "in.yaml", "split_part": "val"}]}
    (tmp_path / "out.yaml").write_text(json.dumps({**head, "splits": {"train": outer}}))
    loaded = load_dataset(tmp_path / "out.yaml").get_datasets(training=False, split_part="train", worker_config=ALONE)
    assert [one.weight for one in loaded.datasets] == [0.4, 0.4, 0.1, 0.1]
