"""Stores give the bytes of a name, wherever they are, and say where that was."""

from __future__ import annotations

import json
import os
import pickle
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from energon_lite import SourceInfo, TextSample
from energon_lite.errors import DatasetError, MissingEntryError, NotPreparedError, UsageError
from energon_lite.extras.media import ByteRangeStore, JsonlFileStore, SystemFileStore, WebdatasetFileStore
from energon_lite.extras.media.metadata import AVMetadata, ImageMetadata
from energon_lite.storage import SampleDecoder
from energon_lite.storage.prepare import prepare_dataset
from energon_lite.storage.stores import DecodeFileStore, FileStoreDecoder, PrimaryFileStore

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


def upload(folder: Path, name: str) -> str:
    files = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            files.pipe_file(f"/{name}/{path.relative_to(folder)}", path.read_bytes())
    return f"memory://{name}"


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
    prepare_dataset(tmp_path / "data", split_ratio="1,0,0")
    store = WebdatasetFileStore(tmp_path / "data")
    assert store.get("b.txt") == b"own"
    with pytest.raises(DatasetError, match="2 samples have the key 'x'"):
        store.get("x.txt")


def test_a_data_set_that_is_not_prepared(ten: Path) -> None:
    with pytest.raises(NotPreparedError):
        WebdatasetFileStore(ten)


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
    stores: list[Any] = [
        WebdatasetFileStore(prepared),
        SystemFileStore(folder),
        SystemFileStore(upload(folder, "media")),
    ]
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
    for store in (
        WebdatasetFileStore(prepared),
        SystemFileStore(folder),
        SystemFileStore(),
        SystemFileStore(upload(folder, "none")),
    ):
        with pytest.raises(UsageError, match="media metadata"):
            store.get_media_metadata("3.jpg")
