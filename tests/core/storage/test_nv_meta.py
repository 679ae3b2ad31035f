from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import DataIndexError
from energon_lite.storage.index import nv_meta
from energon_lite.storage.tar.tar_scan import scan_shard


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / ".nv-meta").mkdir()
    return str(tmp_path)


def test_info(root: str) -> None:
    counts = {"b.tar": 3, "a.tar": 0}
    assert not nv_meta.is_prepared(root)
    path = nv_meta.write_info(root, counts)
    assert nv_meta.is_prepared(root) and list(nv_meta.read_info(root).items()) == list(counts.items())
    document = json.loads(Path(path).read_text())
    assert set(document) == {"energon_version", "shard_counts"}  # Energon refuses other keys
    assert not Path(root, ".nv-meta/.info.yaml").exists()


def test_info_of_old_data_sets(root: str) -> None:
    nv_meta.write_info(root, {"a.tar": 5}, legacy=True)
    Path(root, ".nv-meta/.info.json").unlink()
    assert nv_meta.is_prepared(root) and nv_meta.read_info(root) == {"a.tar": 5}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"shard_counts": {"a": -1}}', '{"shard_counts": {"a": true}}', '{"shard_counts": [1]}']
)
def test_a_damaged_info(root: str, text: str) -> None:
    Path(root, ".nv-meta/.info.json").write_text(text)
    with pytest.raises(DataIndexError, match=r"list of shards is damaged[\s\S]*\.info\.json[\s\S]*--force-overwrite"):
        nv_meta.read_info(root)


OUTSIDE = (
    *("/etc/passwd", "../x.tar", "a/../../x.tar", "..", "", "s3://b/x.tar", "file:///x.tar", "a\0b", "a/..", "\ud800"),
)


@pytest.mark.parametrize("name", [nv_meta.INFO_JSON, nv_meta.INFO_YAML])
@pytest.mark.parametrize("shard", OUTSIDE)
def test_shards_outside_of_the_folder(root: str, shard: str, name: str) -> None:
    """What a folder says about itself may be anybody's words: they lead to no file outside of it."""
    Path(root, ".nv-meta", name).write_text(json.dumps({"shard_counts": {"a.tar": 1, shard: 2}}))
    with pytest.raises(DataIndexError, match=rf"(outside of|damaged)[\s\S]*{name}[\s\S]*fix") as caught:
        nv_meta.read_info(root)
    assert caught.value.fix


@pytest.mark.parametrize("shard", ["a.tar", "sub/d.d/a..b.tar", "...tar", "./a.tar", "caf\udce9.tar"])
def test_shards_inside_of_the_folder(root: str, shard: str) -> None:
    nv_meta.write_info(root, {shard: 2})
    assert nv_meta.read_info(root) == {shard: 2}


@pytest.mark.parametrize("name", [nv_meta.INFO_JSON, nv_meta.INFO_YAML])
@pytest.mark.parametrize(
    "data", [b"\xff\xfe", b"[" * 100_000, b'{"shard_counts": {"a": ' + b"9" * 5000 + b"}}", b"- " * 9000]
)
def test_files_that_cannot_be_read(root: str, name: str, data: bytes) -> None:
    """Not UTF-8, nested without end, numbers without end: an error that names the file."""
    Path(root, ".nv-meta", name).write_bytes(data)
    with pytest.raises(DataIndexError, match=rf"damaged[\s\S]*{name}"):
        nv_meta.read_info(root)


@pytest.mark.parametrize("read", [nv_meta.read_info, nv_meta.read_uuid])
def test_files_without_end(root: str, read: Callable[[str], object]) -> None:
    """A file of holes takes no room on a disk, and all memory where it is read."""
    for name in (nv_meta.INFO_JSON, nv_meta.UUID_FILE):
        with open(Path(root, ".nv-meta", name), "wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(DataIndexError, match=r"more than [0-9]+ bytes"):
        read(root)


@given(data=st.data())
def test_a_changed_info_is_read_or_refused_by_us(root: str, data: st.DataObject) -> None:
    text = bytearray(Path(nv_meta.write_info(root, {"a.tar": 3, "b/c.tar": 10})).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 9))
        text[at : at + length] = data.draw(
            st.binary(max_size=6) | st.sampled_from([b"[", b"{", b'"', b"../", b"9" * 5000])
        )
    Path(root, ".nv-meta/.info.json").write_bytes(text)
    try:
        counts = nv_meta.read_info(root)
    except DataIndexError as error:
        assert error.fix and error.where
    else:
        assert all(name and ".." not in name.split("/") and not name.startswith("/") for name in counts)


def test_uuid(root: str) -> None:
    assert nv_meta.read_uuid(root) == ""
    nv_meta.write_meta(root, nv_meta.UUID_FILE, "12-34")
    assert nv_meta.read_uuid(root) == "12-34"
    Path(root, ".nv-meta", nv_meta.UUID_FILE).write_bytes(b"\xff\xfe")
    with pytest.raises(DataIndexError, match=r"not text[\s\S]*index\.uuid"):
        nv_meta.read_uuid(root)


def test_tar_index(make_tar: Callable[..., Path], tmp_path: Path) -> None:
    make_tar("s/a.0.tar", [("0.txt", b"x"), ("0.cls", b"x"), ("1.txt", b"x" * 600)])
    path = nv_meta.write_shard_index(str(tmp_path), scan_shard(str(tmp_path), "s/a.0.tar"))
    assert path.endswith("s/a.0.tar.idx")
    assert struct.unpack("<3Q", Path(path).read_bytes()) == (0, 2048, 3584)
