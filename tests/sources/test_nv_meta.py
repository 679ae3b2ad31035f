from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from energon_lite.errors import DataIndexError
from energon_lite.sources import nv_meta
from energon_lite.sources.tar_scan import scan_shard


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


def test_split(root: str) -> None:
    path = nv_meta.write_split(root, {"train": ["a{0..3}.tar"], "val": []}, ["a1.tar/key"])
    assert yaml.safe_load(Path(path).read_text()) == {
        "split_parts": {"train": ["a{0..3}.tar"], "val": []},
        "exclude": ["a1.tar/key"],
    }


def test_uuid(root: str) -> None:
    assert nv_meta.read_uuid(root) == ""
    nv_meta.write_uuid(root, "12-34")
    assert nv_meta.read_uuid(root) == "12-34"


def test_tar_index(make_tar: Callable[..., Path], tmp_path: Path) -> None:
    make_tar("s/a.0.tar", [("0.txt", b"x"), ("0.cls", b"x"), ("1.txt", b"x" * 600)])
    path = nv_meta.write_tar_index(str(tmp_path), scan_shard(str(tmp_path), "s/a.0.tar"))
    assert path.endswith("s/a.0.tar.idx")
    assert struct.unpack("<3Q", Path(path).read_bytes()) == (0, 2048, 3584)
