"""Stores give the bytes of a name, wherever they are, and say where that was."""

from __future__ import annotations

import json
import os
import pickle
import sqlite3
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite import SourceInfo, TextSample
from energon_lite.errors import DatasetError, MissingEntryError, NotPreparedError, UsageError
from energon_lite.extras.media import (
    ByteRangeStore,
    JsonlFileStore,
    SystemFileStore,
    WebdatasetFileStore,
    webdataset_store,
)
from energon_lite.extras.media.metadata import AVMetadata, ImageMetadata
from energon_lite.storage import SampleDecoder
from energon_lite.storage.prepare import prepare_dataset, prepare_jsonl
from energon_lite.storage.stores import DecodeFileStore, FileStoreDecoder, PrimaryFileStore
from tests.servers import upload

METADATA = "CREATE TABLE media_metadata (entry_key TEXT PRIMARY KEY, metadata_type TEXT, metadata_json TEXT)"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENERGON_LITE_CACHE", os.fspath(tmp_path / "cache"))


@pytest.fixture
def prepared(ten: Path) -> Path:
    prepare_dataset(ten, split_ratio="1,0,0")
    return ten


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "files/deep").mkdir(parents=True)
    (tmp_path / "files/a.txt").write_bytes(b"0123456789")
    (tmp_path / "files/deep/b.json").write_text("[1]")
    (tmp_path / "secret").write_text("secret")
    return tmp_path / "files"


def test_parts_of_a_prepared_data_set(prepared: Path) -> None:
    store = WebdatasetFileStore(prepared)
    again = pickle.loads(pickle.dumps(store))
    for number, shard in ((0, "a.tar"), (3, "a.tar"), (4, "b.tar"), (9, "sub/c.tar")):
        for one in (store, again):
            data, source = one[f"{number}.txt"]
            assert data == f"text {number}".encode() and one.get(f"{number}.cls") == b"%d" % number
            names = (f"{number}.txt",)
            assert source == SourceInfo(dataset_path=str(prepared), index=names[0], shard_name=shard, file_names=names)
    assert len(store) == 10 and store.get_path() == str(prepared)


@pytest.mark.parametrize("key", ["10.txt", "0.jpg", "0", "", ".txt", "a/0.txt", "0.txt.gz", "__meta__/x.txt"])
def test_parts_that_are_not_there(prepared: Path, key: str) -> None:
    with pytest.raises(KeyError) as error:
        WebdatasetFileStore(prepared)[key]
    assert isinstance(error.value, MissingEntryError) and str(prepared) in str(error.value)


def test_a_key_that_two_samples_have(make_tar: Callable[..., Path], tmp_path: Path) -> None:
    for shard in ("data/a.tar", "data/b.tar"):
        make_tar(shard, [("x.txt", shard.encode()), (f"{shard[5]}.txt", b"own")])
    with pytest.raises(NotPreparedError):
        WebdatasetFileStore(tmp_path / "data")
    prepare_dataset(tmp_path / "data", split_ratio="1,0,0")
    store = WebdatasetFileStore(tmp_path / "data")
    assert store.get("b.txt") == b"own"
    with pytest.raises(DatasetError, match="2 samples have the key 'x'"):
        store.get("x.txt")


def test_lines_of_a_jsonl_file(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"n": 0}\n{"n": 1}\n')
    store = JsonlFileStore(path)
    assert json.loads(store.get("1.json")) == {"n": 1} and store["0.json"][1].index == 0
    assert pickle.loads(pickle.dumps(store)).get("1.json") == store.get("1.json")
    for key in ("2.json", "-1.json", "x.json", "1.txt"):
        with pytest.raises(MissingEntryError):
            store.get(key)


def test_files_of_a_folder(folder: Path) -> None:
    sample = TextSample(__key__="k", __restore_key__=(), text="")
    for base in (os.fspath(folder), folder, f"file://{folder}"):
        store = SystemFileStore(base)
        assert store.get("deep/b.json") == b"[1]" and store.get(f"{folder}/a.txt", sample) == b"0123456789"
    assert store["a.txt"][1].file_names == ("a.txt",) and store.get_path() == str(folder)
    assert sample.__sources__ is not None and len(sample.__sources__) == 3
    assert SystemFileStore().get(os.fspath(folder / "a.txt")) == b"0123456789"


@pytest.mark.parametrize(
    "key", ["../secret", "deep/../../secret", "/etc/passwd", "b.txt", "deep", "a.txt/x", "x" * 300]
)
def test_files_that_are_not_in_the_folder(folder: Path, key: str) -> None:
    url = upload(folder, f"missing-{abs(hash(key))}")
    for store in (SystemFileStore(folder), SystemFileStore(url)):
        with pytest.raises(
            DatasetError if len(key) > 99 and store.base_dir != url else (MissingEntryError, DatasetError)
        ):
            store.get(key)
    with pytest.raises(FileNotFoundError):
        SystemFileStore(folder).get("b.txt")
    with pytest.raises(DatasetError, match="no such folder"):
        SystemFileStore(folder / "x")


def test_pieces_of_files(folder: Path) -> None:
    for base in (os.fspath(folder), upload(folder, "pieces")):
        store = ByteRangeStore(base)
        assert store.get("a.txt#bytes=3:4") == b"3456"
        for key in ("a.txt", "a.txt#bytes=3", "a.txt#bytes=-1:2", "a.txt#bytes=8:3", "../secret#bytes=0:1"):
            with pytest.raises((MissingEntryError, DatasetError)):
                store.get(key)


def test_behind_a_url(prepared: Path, folder: Path) -> None:
    store = WebdatasetFileStore(upload(prepared, "store"))
    assert store.get("9.txt") == b"text 9" and pickle.loads(pickle.dumps(store)).get("4.cls") == b"4"
    files = SystemFileStore(upload(folder, "files"))
    assert files.get("deep/b.json") == b"[1]"
    assert files["a.txt"][1].dataset_path == "memory://files"


def test_decoded_as_the_name_says(prepared: Path) -> None:
    inner = WebdatasetFileStore(prepared)
    store = DecodeFileStore(inner, decoder=SampleDecoder())
    assert (store.get("3.txt"), store.get("3.cls"), store.get_path()) == ("text 3", 3, str(prepared))
    assert store.decoded("3.cls", store.raw("3.cls")[0]) == 3
    primary = PrimaryFileStore[Any](store, "7")
    assert (primary.get(".txt"), primary.get("3.txt"), primary.get_path()) == ("text 7", "text 3", str(prepared))
    assert primary.decoded(".cls", primary.raw(".cls")[0]) == 7
    assert isinstance(SampleDecoder(), FileStoreDecoder)


def test_media_metadata(prepared: Path, folder: Path) -> None:
    (folder / ".nv-meta").mkdir()
    for place in (prepared, folder):
        with sqlite3.connect(place / ".nv-meta/index.sqlite") as connection:
            connection.execute(METADATA)
            rows = [
                ("3.jpg", "image", '{"width":4,"height":3,"format":"JPEG","mode":"RGB","later":1}'),
                ("3.mp4", "av", '{"video_fps":25.0}'),
                ("wrong", "smell", "{}"),
            ]
            connection.executemany("INSERT INTO media_metadata VALUES (?, ?, ?)", rows)
    files = [SystemFileStore(base) for base in (folder, upload(folder, "media"))]
    stores: list[Any] = [WebdatasetFileStore(prepared), *files]
    for store in [*stores, DecodeFileStore(stores[0], decoder=SampleDecoder()), pickle.loads(pickle.dumps(stores[1]))]:
        assert store.get_media_metadata("3.jpg") == ImageMetadata(width=4, height=3, format="JPEG", mode="RGB")
        found = store.get_media_metadata("3.mp4")
        assert isinstance(found, AVMetadata) and found.to_dict() == {"video_fps": 25.0}
        with pytest.raises(KeyError, match=r"x\.jpg"):
            store.get_media_metadata("x.jpg")
        with pytest.raises(DatasetError, match="smell"):
            store.get_media_metadata("wrong")
    assert PrimaryFileStore[Any](stores[0], "3").get_media_metadata(".mp4").video_fps == 25.0


def test_without_media_metadata(prepared: Path, folder: Path) -> None:
    files = [SystemFileStore(*base) for base in ([folder], [], [upload(folder, "none")])]
    for store in (WebdatasetFileStore(prepared), *files):
        with pytest.raises(UsageError, match="media metadata"):
            store.get_media_metadata("3.jpg")


# -- what a store has, as Energon's list it; no shard is read ----------------------------------------------------------


@pytest.fixture
def shards(make_tar: Callable[..., Path], tmp_path: Path) -> Path:
    """Three shards; parts of all sizes, long names that need headers of their own, and keys with dots in folders."""
    for shard, first in (("a", 0), ("b", 3), ("c", 7)):
        members = []
        for number in range(first, first + 3 + (shard == "b")):
            key = f"{'deep.er/' * (number % 3 == 1)}{'k' * (150 if number == 4 else 1)}{number}"
            members += [(f"{key}.txt", b"x" * (number * 211)), (f"{key}.seg.json", json.dumps([number]).encode())]
        make_tar(f"data/{shard}.tar", members, tarfile.GNU_FORMAT)
    prepare_dataset(tmp_path / "data", split_ratio="1,1,1")
    return tmp_path / "data"


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"n": 0}\n\n  {"n": "long"}  \n{"n": 2}\n')
    prepare_jsonl(path)
    return path


def test_what_a_prepared_data_set_has(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = WebdatasetFileStore(shards)
    samples, parts = list(store.list_all_samples()), list(store.list_all_sample_parts())
    assert len(parts) == 2 * len(store) and all(len(store.get(name)) == size for name, size, _ in parts)
    monkeypatch.setattr(webdataset_store, "_LISTED", 2)  # stretches end in the middle of a shard
    assert list(store.list_all_samples()) == samples and list(store.list_all_sample_parts()) == parts
    with pytest.raises(MissingEntryError, match="no sample 'nobody'"):
        next(store.list_sample_parts("nobody"))
    store.close()
    assert store.get(parts[3][0])


def test_what_a_jsonl_file_has(lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webdataset_store, "_LISTED", 2)
    store = JsonlFileStore(lines)
    samples = list(store.list_all_samples())
    assert [(key, shard) for key, _, shard in samples] == [("0", 0), ("1", 0), ("2", 0)]
    assert sum(size for _, size, _ in samples) == store.get_total_size() == lines.stat().st_size
    parts = list(store.list_all_sample_parts())
    assert [json.loads(store.get(name))["n"] for name, _, _ in parts] == [0, "long", 2]
    assert [part for key, _, _ in samples for part in store.list_sample_parts(key)] == parts
    for key in ("3", "-1", "x", ""):
        with pytest.raises(MissingEntryError):
            next(store.list_sample_parts(key))


def test_the_same_as_energon_lists(shards: Path, lines: Path) -> None:
    pytest.importorskip("megatron.energon")
    from megatron.energon.cache.file_store import JsonlFileStore as TheirJsonl
    from megatron.energon.cache.file_store import WebdatasetFileStore as TheirWebdataset
    from megatron.energon.epathlib import EPath

    def listed(store: Any, key: str) -> list[Any]:
        return [*store.list_all_sample_parts(), *store.list_sample_parts(key), store.get_total_size(), len(store)]

    theirs, ours = TheirWebdataset(EPath(shards)), WebdatasetFileStore(shards)
    assert list(ours.list_all_samples()) == list(theirs.list_all_samples())
    for key, _, _ in ours.list_all_samples():
        assert listed(ours, key) == listed(theirs, key)
        assert list(ours.list_sample_parts(key, slow_mode=True)) == list(theirs.list_sample_parts(key, slow_mode=True))
    their_lines, our_lines = TheirJsonl(EPath(lines)), JsonlFileStore(lines)
    assert our_lines.get_total_size() == their_lines.get_total_size()
    for key in "012":
        assert list(our_lines.list_sample_parts(key)) == list(their_lines.list_sample_parts(key))
    # Energon's lists count lines from 1, and so name a part that is not there, and leave out the first.
    shifted = [(str(int(key) + 1), size, shard) for key, size, shard in our_lines.list_all_samples()]
    assert shifted == list(their_lines.list_all_samples())
