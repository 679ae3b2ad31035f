"""Metadatasets, JSONL files and data sets behind URLs: what they name counts from where they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite.documents.paths import join_url
from energon_lite.errors import ConfigError, DatasetError, NotPreparedError, ShardChangedError
from energon_lite.extras.formats import jsonl_index
from energon_lite.extras.remote import file_versions
from energon_lite.storage.prepare import prepare_dataset
from energon_lite.storage.read.opened_source import data_digest
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.servers import Files, upload
from tests.testing import output_of, val_loader


@pytest.fixture
def put(memory: Any) -> Callable[[str, str | bytes], None]:
    """Writes a file into the store ``memory://``."""
    return lambda place, what: memory.pipe_file(f"/{place}", what.encode() if isinstance(what, str) else what)


def samples(path: Any) -> list[Any]:
    return list(val_loader(path, split_part="train"))


def keys(path: Any) -> list[str]:
    return [getattr(sample, "__key__", None) or sample["__key__"] for sample in samples(path)]


def test_a_tree_of_documents(put: Callable[..., None], leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    one, two, three = leaf_of(3, "r"), leaf_of(2, "s"), leaf_of(2, "t")
    for leaf in (one, two):
        WebdatasetSource.open(leaf)  # makes the index, which goes up with the rest
    upload(one, "bucket/data/one")
    upload(two, "bucket/two")
    put("bucket/data/chats.jsonl", '{"n": 1}\n{"n": 2}\n')
    put("bucket/blends/inner.yaml", "splits: {train: {path: ../../bucket/two}, val: {path: ../two}}")
    outer = [{"path": "../data/one"}, {"path": "inner.yaml", "split_part": "val"}, {"path": "../data/chats.jsonl"}]
    outer.append({"path": f"file://{three}"})
    put("bucket/blends/outer.yaml", json.dumps({"splits": {"train": {"blend": outer}}}))
    expected = ["r-0", "r-1", "r-2", "s-0", "s-1", "0", "1", "t-0", "t-1"]
    assert keys("memory://bucket/blends/outer.yaml") == expected
    (tmp_path / "local.yaml").write_text("splits: {train: {path: 'memory://bucket/blends/outer.yaml'}}")
    assert keys(tmp_path / "local.yaml") == keys(f"file://{tmp_path}/local.yaml") == expected
    assert keys({"splits": {"train": {"path": "memory://bucket/blends/outer.yaml"}}}) == expected
    said = output_of("prepare", "memory://bucket/blends/outer.yaml")
    assert "memory://bucket/two [val]: 2 samples" in said and "4 data sets ready" in said
    with pytest.raises(ConfigError, match=r"leads out of the store[\s\S]*memory://bucket/blends/inner.yaml:1"):
        keys("memory://bucket/blends/inner.yaml")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("path: /data/one", r"absolute path in a document behind a URL[\s\S]*'file:///data/one'"),
        ("path: '../../../etc'", r"leads out of the store"),
        ("path: 'simplecache::memory://x'", r"chained URLs"),
        ("path: inner.yaml", r"cannot read the document[\s\S]*memory://bucket/blends/inner.yaml"),
        ("pth: x", r"unknown key 'pth'[\s\S]*memory://bucket/blends/a.yaml:1:18"),
    ],
)
def test_what_a_document_cannot_name(put: Callable[..., None], entry: str, message: str) -> None:
    put("bucket/blends/a.yaml", f"splits: {{train: {{{entry}}}}}")
    with pytest.raises(ConfigError, match=message):
        keys("memory://bucket/blends/a.yaml")


def test_what_is_not_there(put: Callable[..., None]) -> None:
    with pytest.raises(ConfigError, match="cannot read the document"):
        keys("memory://bucket/none.yaml")
    with pytest.raises(NotPreparedError, match="no such JSONL file"):
        keys("memory://bucket/none.jsonl")
    with pytest.raises(DatasetError, match="fsspec cannot open nosuchstore://"):
        keys("nosuchstore://bucket/a.yaml")


def test_urls_of_documents() -> None:
    assert join_url("s3://bucket/a/b.yaml", "../c/./d") == "s3://bucket/c/d"
    assert join_url("https://host/b.yaml", "c.jsonl") == "https://host/c.jsonl"
    assert join_url("memory://b.yaml", "c") == "memory://c"
    for path in ("../other/x", "x/../../y"):
        with pytest.raises(ValueError, match="x"):
            join_url("s3://bucket/b.yaml", path)


LINES = b'\xef\xbb\xbf{"n": 0}\r\n{"n": 1}\n\n   \n{"n": 2}\n{"n": 3, "text": "\xc3\xbc"}'


@pytest.mark.parametrize("data", [LINES, LINES + b"\n", b'{"n": 0}\n{"n": 1}\n{"n": 2}\n{"n": 3}\n'])
@pytest.mark.parametrize("indexed", [False, True, "stale", "cut", "empty", "twice", "early"])
def test_lines(put: Callable[..., None], tmp_path: Path, data: bytes, indexed: bool | str) -> None:
    """The samples, and their order, are those of a local copy, whether or not there is an index beside the file."""
    local = tmp_path / "chats.jsonl"
    local.write_bytes(data)
    put("bucket/chats.jsonl", data)
    here = WebdatasetSource.open(local)
    if indexed:
        starts = np.append(here.index.samples[:-1][:, 2], len(data) + (indexed == "stale"))
        starts[0] -= indexed == "early"
        made = np.repeat(starts, 1 + (indexed == "twice"))[: 0 if indexed == "empty" else None].astype("<u8").tobytes()
        put("bucket/chats.jsonl.idx", made + b"\0" * (indexed == "cut"))
    url = "memory://bucket/chats.jsonl"
    there = WebdatasetSource.open(url)
    assert there.fingerprint == here.fingerprint and there.contents == here.contents
    # An index says where lines begin, so white space around them is with them.
    assert (data_digest(there) == data_digest(here)) is (indexed is not True or data.startswith(b"{"))
    found = [[sample["json"]["n"] for sample in samples(path)] for path in (url, str(local))]
    assert found[0] == found[1] == [0, 1, 2, 3]


@pytest.mark.parametrize(("spare", "message"), [(64.0, "written to while it was read"), (14 / 16, "was replaced")])
def test_a_file_that_changes(
    put: Callable[..., None], spare: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is detected after the scan, and during it if a request for the record is due at a read there."""
    put("bucket/chats.jsonl", '{"n": 1}\n')
    put("bucket/chats.jsonl.idx", np.array([0, 9], dtype="<u8").tobytes())
    assert len(WebdatasetSource.open("memory://bucket/chats.jsonl")) == 1
    with monkeypatch.context() as patch:
        patch.setattr(jsonl_index, "_starts", None)  # its index is kept
        assert len(WebdatasetSource.open("memory://bucket/chats.jsonl")) == 1
    put("bucket/chats.jsonl", '{"n": 1}\n{"n": 2}\n')
    assert len(WebdatasetSource.open("memory://bucket/chats.jsonl")) == 2
    put("bucket/chats.jsonl", '{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    monkeypatch.setattr(jsonl_index, "_starts", lambda url, size: put("bucket/chats.jsonl", "{}\n" * 20))
    monkeypatch.setattr(file_versions, "_spare", [spare])  # a sixteenth more at each read
    with pytest.raises(ShardChangedError, match=message):
        WebdatasetSource.open("memory://bucket/chats.jsonl")


def test_over_http(serve: Callable[..., str], tmp_path: Path, leaf_of: Callable[..., Path]) -> None:
    """A server that knows no ranges gives documents, too."""
    (tmp_path / "a.yaml").write_text(json.dumps({"splits": {"train": {"path": f"file://{leaf_of(3, 'r')}"}}}))
    assert keys(f"{serve(Files)}/a.yaml") == ["r-0", "r-1", "r-2"]


# -- a data set in a folder, in Energon's cache of data sets, and by NVIDIA's multi-storage-client ---------------------


OPTIONS = {"split_ratio": "1,0,0", "sample_type": "TextSample", "field_map": {"text": "txt"}}


def texts_of(path: str, workers: int = 0) -> list[str]:
    with val_loader(path, workers, split_part="train", batch_size=5) as loader:
        return [text for batch in loader for text in batch.text]


EXPECTED = [f"text {number}" for number in range(10)]


def test_file(ten: Path) -> None:
    prepare_dataset(ten, **OPTIONS)  # type: ignore[arg-type]
    assert texts_of(f"file://{ten}") == EXPECTED


def test_cached_data_sets(ten: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_dataset(ten, **OPTIONS)  # type: ignore[arg-type]
    (tmp_path / "cache/coco").mkdir(parents=True)
    (tmp_path / "cache/coco/1.2").symlink_to(tmp_path)
    monkeypatch.setenv("NVDATASET_CACHE_DIR", str(tmp_path / "cache"))
    assert texts_of("dss://coco@1.2/ten") == EXPECTED
    (tmp_path / "blend.yaml").write_text("splits: {train: {path: 'dss://coco@1.2/ten'}}")
    assert texts_of(str(tmp_path / "blend.yaml")) == EXPECTED


@pytest.mark.usefixtures("clients")
@pytest.mark.parametrize("workers", [0, 2])
def test_multi_storage_client(ten: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    pytest.importorskip("multistorageclient")
    provider = {"storage_provider": {"type": "file", "options": {"base_path": str(tmp_path)}}}
    (tmp_path / "msc.yaml").write_text(json.dumps({"profiles": {f"here{workers}": provider}}))
    # Its clients are kept by the names of their profiles.
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.yaml"))
    monkeypatch.setenv("MSC_DISABLE_TELEMETRY", "1")
    report = prepare_dataset(f"msc://here{workers}/ten", **OPTIONS)  # type: ignore[arg-type]
    assert report.samples == 10 and (ten / ".nv-meta/.info.json").exists()
    assert texts_of(f"msc://here{workers}/ten", workers) == EXPECTED
