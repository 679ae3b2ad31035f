"""Data sets as objects: what a dataset.yaml names, a class of one's own, metadatasets that are looked into, and the
functions of their classes."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
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
from energon_lite.errors import ConfigError, DatasetError, NotPreparedError, ShardFormatError, TrustError, UsageError
from energon_lite.extras.energon import (
    BaseWebdatasetFactory,
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
from energon_lite.extras.energon.compat.documents import prepare_filesystem_dataset
from energon_lite.extras.energon.factories.kinds import (
    EnergonDatasetType,
    MetadatasetNode,
    WebdatasetMeta,
    get_dataset_type,
)
from energon_lite.extras.energon.factories.loaders import DatasetBlendMode, DatasetSubset, get_dataset_from_config
from energon_lite.extras.media import ImageMetadata, MediaFilterConfig, SystemFileStore, WebdatasetFileStore
from energon_lite.storage.read import source as sources
from tests.extras.energon.test_filters import open_numbers
from tests.tables_by_hand import png
from tests.testing import ALONE, batches_of, write_tar

FIELDS: dict[str, Any] = {"field_map": {"text": "txt"}}


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


HEAD = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}


def write_metadataset(path: Path, **splits: Any) -> None:
    path.write_text(json.dumps({**HEAD, "splits": splits}))


@pytest.fixture
def shouting(monkeypatch: pytest.MonkeyPatch, write_dataset: Callable[..., Path], tmp_path: Path) -> Path:
    module = types.ModuleType("shouts")
    module.ShoutWebdataset, module.Other = ShoutWebdataset, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shouts", module)
    document = "__module__: shouts\n__class__: ShoutWebdataset\nfield_map: {text: txt}\nmarks: 2\n"
    shard = [(f"k{number}", {"txt": f"text {number}".encode()}) for number in range(6)]
    return write_dataset(tmp_path / "shouts", {"0.tar": shard}, dataset_yaml=document)


def texts(dataset: Any) -> list[str]:
    return [sample.text for sample in batches_of(dataset)]


def test_a_class_of_ones_own(shouting: Path) -> None:
    dataset = get_val_dataset(shouting, worker_config=ALONE, trust_code=True, subflavors={"run": 7})
    with get_savable_loader(dataset) as loader:
        samples = list(loader)
        assert [sample.text for sample in samples] == [f"TEXT {number}!!" for number in range(6)]
        assert samples[3].__subflavors__ == {"run": 7} and samples[3].__sources__[0].index == 3
        assert loader.restore_sample(samples[2].__restore_key__) == samples[2]
    with pytest.raises(TrustError, match="shouts"):
        get_val_dataset(shouting, worker_config=ALONE)
    for name, words in (("Other", "not a data set class"), ("Absent", "cannot import 'Absent'")):
        (shouting / ".nv-meta" / "dataset.yaml").write_text(f"__module__: shouts\n__class__: {name}\n")
        with pytest.raises(ConfigError, match=words):
            get_val_dataset(shouting, worker_config=ALONE, trust_code=True)


def test_it_can_be_built_by_hand(shouting: Path) -> None:
    factory = ShoutWebdataset(shouting, split_part="val", worker_config=ALONE, **FIELDS)
    assert len(factory) == 6 and texts(factory.build())[0] == "TEXT 0!" and str(factory.paths[0]) == str(shouting)
    trained = ShoutWebdataset(shouting, split_part="train", worker_config=ALONE, training=True, **FIELDS)
    every = get_train_dataset(shouting, worker_config=ALONE, batch_size=None, trust_code=True)
    assert trained.build().leaves[0].key == every.leaves[0].key  # the same order
    found = batches_of(MapDataset(trained.build(), lambda sample: sample.text), 12)
    assert sorted(found[:6]) == sorted(found[6:]) == [f"TEXT {number}!" for number in range(6)]
    with pytest.raises(UsageError, match="field_map and sample_loader"):
        ShoutWebdataset(shouting)


def test_a_class_that_makes_dicts(shouting: Path) -> None:
    class Counts(ShoutWebdataset):
        def load_sample(self, sample: Any) -> Any:
            return {"marks": self.marks, "__key__": sample["__key__"] + "!", "__subflavors__": {"run": 1, "own": 2}}

    factory = Counts(shouting, split_part="val", worker_config=ALONE, subflavors={"run": 7}, **FIELDS)
    with get_loader(factory.build()) as loader:
        sample = list(loader)[3]
        assert (sample["marks"], sample["__key__"], sample["__subflavors__"]) == (1, "k3!", {"run": 7, "own": 2})
        assert sample["__sources__"][0].index == 3 and sample["__shard__"] == "0.tar"
        assert loader.restore_sample(sample["__restore_key__"]) == sample


def test_what_a_document_means(leaf_of: Callable[..., Path]) -> None:
    path = leaf_of(5)
    factory = get_dataset_from_config(path, worker_config=ALONE, training=False, split_part="val")
    assert isinstance(factory, StandardWebdatasetFactory) and factory.__sample_type__ is TextSample
    assert factory.split_config == "split.yaml"
    assert texts(factory.build()) == [f"a-{number}" for number in range(5)]
    with pytest.raises(UsageError, match="not CaptioningSample"):
        get_dataset_from_config(path, worker_config=ALONE, sample_type=energon_lite.CaptioningSample)
    crude = CrudeWebdataset(path, split_part="val", worker_config=ALONE, part_filter=["txt"])
    assert [sample["txt"] for sample in batches_of(crude.build())] == [f"a-{number}" for number in range(5)]
    for part_filter, has_text in ((["jpg"], False), (None, True)):
        document = HEAD | {"__class__": "CrudeWebdataset", "part_filter": part_filter}
        (path / ".nv-meta/crude.yaml").write_text(json.dumps(document))
        named = get_dataset_from_config(path, dataset_config="crude.yaml", worker_config=ALONE)
        assert ("txt" in batches_of(named.build(), 1)[0]) == has_text
    with pytest.warns(DeprecationWarning, match="sample_type: TextSample"):
        typed = TextWebdataset(path, split_part="val", worker_config=ALONE, **FIELDS)
    part = DatasetSubset(absolute_range=(1, 3))
    half = StandardWebdatasetFactory(path, sample_type=TextSample, subset=part, **FIELDS)
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
    assert [sample["json"]["n"] for sample in batches_of(factory.build())] == [0, 1]
    found = load_dataset(tmp_path / "a.jsonl").get_datasets(training=False, split_part="x", worker_config=ALONE)
    assert found.blend_mode is DatasetBlendMode.NONE and [len(one.dataset) for one in found.datasets] == [2]


def test_metadatasets_are_looked_into(leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    a, b = leaf_of(5, "a"), leaf_of(6, "b")
    blend = MetadatasetNode(blend=[MetadatasetNode(path=a, weight=3), MetadatasetNode(path=b, weight=1, subset=None)])
    document = MetadatasetV2(tmp_path / "blend.yaml", splits={"train": blend})
    assert [spec.weight for spec in document.specs("train")] == [0.75, 0.25]
    leaves = [{"path": str(a), "repetitions": 2, "subflavors": {"k": 1}}, {"path": str(b), "repetitions": 0.5}]
    write_metadataset(tmp_path / "in.yaml", train={"blend_epochized": leaves})
    write_metadataset(tmp_path / "out.yaml", train={"path": "in.yaml", "subflavors": {"k": 2}})
    found = traverse_metadataset(tmp_path / "out.yaml", split_part="train")
    assert [str(one.path) for one in found] == [str(a), str(b)]
    assert [(one.split_part, one.subflavors) for one in found] == [("train", {"k": 2})] * 2
    half, of_train = DatasetSubset(range=(0, 0.5)), {"training": True, "split_part": "train", "worker_config": ALONE}
    loaded = load_dataset(tmp_path / "out.yaml").get_datasets(**of_train, subset=half)
    assert loaded.blend_mode is DatasetBlendMode.SAMPLE_REPETITIONS
    shares = [(one.repetitions, one.weight, len(one.dataset)) for one in loaded.datasets]
    assert shares == [(2, None, 2), (0.5, None, 3)]
    for times, epochs in ((3, 6), (-1, -1), (None, None)):
        once = load_dataset({"splits": {"train": {"path": str(a), "shuffle_over_epochs_multiplier": 2}}})
        (one,) = once.get_datasets(**of_train, shuffle_over_epochs_multiplier=times).datasets
        assert (one.dataset.shuffle_over_epochs, one.weight) == (epochs, None)  # type: ignore[attr-defined]
    prepare_metadataset(tmp_path / "out.yaml")
    write_metadataset(tmp_path / "out.yaml", val={"pth": "in.yaml"})
    with pytest.raises(ConfigError, match="pth"):
        prepare_metadataset(tmp_path / "out.yaml")
    with pytest.raises(UsageError, match="not a metadataset"):
        traverse_metadataset(a, split_part="train")
    (tmp_path / "empty.yaml").write_text(json.dumps(HEAD))
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
    write_metadataset(tmp_path / "odd.yaml", train={"path": str(path), "filter": "odd"})
    loaded = load_dataset(tmp_path / "odd.yaml").get_datasets(training=False, split_part="train", worker_config=ALONE)
    by_name = get_dataset_from_config(path, split_part="train", training=False, worker_config=ALONE, filter_name="odd")
    for factory in (loaded.datasets[0].dataset, by_name):
        samples = batches_of(factory.build())
        found = [sample["json"]["n"] if kind == "jsonl" else int(sample.text[2:]) for sample in samples]
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
    assert batches_of(raw, 1)[0].text == [b"a-0", b"a-1"]


def test_sources_of_ones_own_have_factories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_registered", {})
    energon_lite.register_source("numbers", open_numbers)
    document = {"splits": {"train": {"path": "numbers://x", "subflavors": {"k": 1}}}}
    (loaded,) = load_dataset(document).get_datasets(training=False, split_part="train", worker_config=ALONE).datasets
    assert [sample["n"] for sample in batches_of(loaded.dataset.build())] == list(range(20))
    assert len(loaded.dataset) == 20 and loaded.dataset.subflavors == {"k": 1}
    assert [one.name for one in loaded.dataset.paths] == ["x"]


def test_weights_are_what_the_documents_say(leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    inner = {"blend": [{"path": str(leaf_of(5, "a")), "weight": 1}, {"path": str(leaf_of(6, "b")), "weight": 1}]}
    write_metadataset(tmp_path / "in.yaml", train=inner, val=inner)
    outer = {"blend": [{"path": "in.yaml", "weight": 4}, {"path": "in.yaml", "split_part": "val"}]}
    write_metadataset(tmp_path / "out.yaml", train=outer)
    loaded = load_dataset(tmp_path / "out.yaml").get_datasets(training=False, split_part="train", worker_config=ALONE)
    assert [one.weight for one in loaded.datasets] == [0.4, 0.4, 0.1, 0.1]


# -- what is in a shard that nobody has prepared ----------------------------------------------------------------------


MEMBERS = ["a/1.jpg", "a/1.json", "__meta__/x.txt", "noext", "2.json", "2.seg.json", "3.jpg", "2.json"]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for number, name in enumerate(MEMBERS):
            info = tarfile.TarInfo(name)
            info.size = number
            tar.addfile(info, io.BytesIO(b"%d" % number * number))
        folder = tarfile.TarInfo("4.json")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    return tmp_path / "s.tar"


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    (tmp_path / "s.jsonl").write_bytes(b'{"n": 0}\n\n  {"n": 1}\n{"n": 2}')
    return tmp_path / "s.jsonl"


def test_samples_of_a_tar(shard: Path, tmp_path: Path) -> None:
    expected = [{"jpg": None, "json": b"1"}, {"json": b"4444", "seg.json": None}, {"jpg": None}, {"json": b"7777777"}]
    assert list(BaseWebdatasetFactory.iter_dataset_content(shard, ("json",))) == expected
    names = [dict.fromkeys(sample) for sample in expected]
    assert list(CrudeWebdataset.iter_dataset_content(str(shard))) == names
    (tmp_path / "s.tar.gz").write_bytes(gzip.compress(shard.read_bytes()))
    fsspec.filesystem("memory").pipe_file("/contents/s.tar", shard.read_bytes())
    for path in (tmp_path / "s.tar.gz", "memory://contents/s.tar"):
        assert list(CrudeWebdataset.iter_dataset_content(path)) == names


@pytest.mark.parametrize("kept", [0, 3300])
def test_what_is_no_whole_tar(shard: Path, kept: int) -> None:
    data = shard.read_bytes()
    shard.write_bytes(b"no tar" * 200 if not kept else data[:kept])
    with pytest.raises(ShardFormatError, match=r"s\.tar"):
        list(CrudeWebdataset.iter_dataset_content(shard, ("json",)))
    with pytest.raises(DatasetError, match="no such file"):
        next(CrudeWebdataset.iter_dataset_content(shard.with_name("gone.tar")))


def test_lines_of_a_file(lines: Path) -> None:
    found = list(CrudeJsonlDatasetFactory.iter_dataset_content(lines))
    assert found == [{"json": b'{"n": %d}' % number} for number in range(3)]
    with pytest.raises(NotPreparedError, match="no such JSONL file"):
        next(CrudeJsonlDatasetFactory.iter_dataset_content("gone.jsonl"))


def test_the_same_as_energon(shard: Path, lines: Path) -> None:
    theirs = pytest.importorskip("megatron.energon")
    for keys in ((), ("json",), ("jpg", "seg.json")):
        expected = list(theirs.BaseWebdatasetFactory.iter_dataset_content(str(shard), keys))
        assert list(BaseWebdatasetFactory.iter_dataset_content(shard, keys)) == expected
    # Theirs have the ends of lines, and the blank ones, which are no samples of theirs either.
    stripped = (line["json"].strip() for line in theirs.CrudeJsonlDatasetFactory.iter_dataset_content(str(lines)))
    assert list(CrudeJsonlDatasetFactory.iter_dataset_content(lines)) == [{"json": one} for one in stripped if one]


# -- preparing by Energon's function: media, and keys that collide ----------------------------------------------------


ALL_TRAIN: dict[str, Any] = {"split_parts_ratio": [("train", 1.0)], "workers": 1}


def test_media_of_shards_and_of_folders(tmp_path: Path) -> None:
    samples = [("0", {"png": png(4, 3), "txt": b"small"}), ("1", {"png": png(9, 8), "txt": b""})]
    write_tar(tmp_path / "set/a.tar", samples)
    options = {**ALL_TRAIN, "media_filter": MediaFilterConfig.parse(None, False, True)}
    assert BaseWebdatasetFactory.prepare_dataset(tmp_path / "set", ["a.tar"], **options) == {"png", "txt"}
    of_shards = WebdatasetFileStore(tmp_path / "set").get_media_metadata("1.png")
    (tmp_path / "files").mkdir()
    (tmp_path / "files/b.png").write_bytes(png(5, 6))
    by_glob = MediaFilterConfig.parse("*.png", False, False)
    assert prepare_filesystem_dataset(tmp_path / "files", by_glob, progress=False, workers=1) == 1
    of_files = SystemFileStore(tmp_path / "files").get_media_metadata("b.png")
    for found, size in ((of_shards, (9, 8)), (of_files, (5, 6))):
        assert isinstance(found, ImageMetadata) and (found.width, found.height) == size


def test_keys_that_collide_are_made_unique(tmp_path: Path) -> None:
    for name in ("a.tar", "b.tar"):
        write_tar(tmp_path / name, [("0", {"txt": name.encode()})])
    BaseWebdatasetFactory.prepare_dataset(tmp_path, ["{a,b}.tar"], **ALL_TRAIN, fix_duplicates=True)
    store = WebdatasetFileStore(tmp_path)
    assert [store[f"{name}/0.txt"][0] for name in ("a.tar", "b.tar")] == [b"a.tar", b"b.tar"]
