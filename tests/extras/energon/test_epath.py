"""Paths by Energon's name: on this machine and in a store."""

from __future__ import annotations

import json
import os
import pickle
import uuid
from pathlib import Path

import pytest

from energon_lite.errors import UsageError
from energon_lite.extras.energon.epath import EPath


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_files(kind: str, tmp_path: Path) -> None:
    root = EPath(tmp_path / "x") if kind == "local" else EPath(f"memory://{uuid.uuid4().hex}/x")
    one = root / "a" / "one.txt"
    one.write_text("ä")
    (root / "b.bin").write_bytes(b"123")
    assert one.read_text() == "ä" and one.size() == len("ä".encode()) and one.is_file() and one.exists()
    assert not one.is_dir() and root.is_dir() and not (root / "absent").exists()
    assert [path.relative_to(root) for path in root.walk()] == ["a/one.txt", "b.bin"]
    assert [str(path) for path in root.glob("**/*.txt")] == [str(one)]
    assert [*root.glob("*")] == [root / "b.bin"] == [*(root / "b.bin").walk()]
    one.copy(root / "c" / "two.txt")
    (root / "b.bin").move(root / "c" / "b.bin")
    assert sorted(path.name for path in (root / "c").walk()) == ["b.bin", "two.txt"]
    root.copy(other := root.parent / "y")
    assert len(list(other.walk())) == 3
    one.unlink()
    one.unlink()  # a second time: it is gone, as it should be
    assert not one.exists() and (root / "c" / "b.bin").stat()["size"] == 3
    with (root / "c" / "b.bin").open("rb") as file:
        assert file.read(2) == b"12"


def test_names() -> None:
    path = EPath("s3://bucket/coco/../coco/train.tar")
    assert path.url == str(path) == "s3://bucket/coco/train.tar" and path.name == path.display_name == "train.tar"
    assert path.parent == EPath("s3://bucket/coco") and path.with_suffix(".idx").name == "train.idx"
    assert path / "/abs" == EPath("/abs") and path.parent / "s3://other/x" == EPath("s3://other/x")
    assert pickle.loads(pickle.dumps(path)) == path and len({path, EPath(path)}) == 1
    assert path.parent < path and not path < path
    assert EPath("s3://a") / EPath("s3://b/c") == "s3://b/c" and EPath("rel") / "../a" == EPath("a")
    assert (path.is_local(), path.profile, EPath("/a").profile) == (False, "s3", "default")
    assert os.fspath(EPath("rel")) == os.path.abspath("rel") and EPath("file:///a/b").local_path() == Path("/a/b")
    assert repr(EPath("/a")) == "EPath('/a')" and str(EPath("/a").internal_path) == "/a"
    with pytest.raises(UsageError, match="not local"):
        path.local_path()
    with pytest.raises(UsageError, match="different stores"):
        path.relative_to(EPath("/a"))


def test_data_sets_of_a_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="version"):
        EPath("dss://charts/x")
    monkeypatch.delenv("NVDATASET_CACHE_DIR", raising=False)
    with pytest.raises(UsageError, match="NVDATASET_CACHE_DIR"):
        EPath("dss://charts@v0/x")
    monkeypatch.setenv("NVDATASET_CACHE_DIR", str(tmp_path))
    path = EPath("dss://charts@v0/x.txt")
    path.write_text("a")
    assert (tmp_path / "charts" / "v0" / "x.txt").read_text() == "a" and os.fspath(path).startswith(str(tmp_path))
    assert path.is_local() and path.display_name == "charts@v0" and path.read_text() == "a"


def test_this_machine_by_the_names_of_multi_storage_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("multistorageclient")
    (tmp_path / "a.txt").write_text("a")
    for profile in ("__filesystem__", "default"):
        path = EPath(f"msc://{profile}{tmp_path}/b/../a.txt")
        assert str(path) == f"{tmp_path}/a.txt" and path.is_local() and path.read_text() == "a"
    provider = {"storage_provider": {"type": "file", "options": {"base_path": str(tmp_path)}}}
    (tmp_path / "msc.json").write_text(json.dumps({"profiles": {"default": provider}}))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    assert str(EPath("msc://default/a.txt")) == "msc://default/a.txt"  # somebody's store has this name


def test_the_old_name_of_multi_storage_client() -> None:
    with pytest.warns(FutureWarning, match="deprecated, write msc://"):
        assert str(EPath("rclone://store/a/../b")) == "msc://store/b"
