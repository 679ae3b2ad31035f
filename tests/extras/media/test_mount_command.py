from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from energon_lite.extras.media.mount_command import FileOperations, FileView
from tests.conftest import text_dataset, write_dataset
from tests.testing import output_of, refusal_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def operations(tmp_path: Path) -> FileOperations:
    shards = {
        "a.tar": [("0", {"txt": b"zero", "seg.png": b"123"}), ("dir/1", {"txt": b"one"})],
        "b.tar": [("dir/sub/2", {"txt": b""}), ("0", {"txt": b"again"})],
    }
    return FileOperations(FileView(str(write_dataset(tmp_path / "set", shards))))


def number_of(call: Any, *arguments: Any) -> int | None:
    with pytest.raises(OSError) as caught:
        call(*arguments)
    return caught.value.errno


class TestOperations:
    def test_what_is_there(self, operations: FileOperations) -> None:
        assert operations.readdir("/", 0) == [".", "..", "0.txt", "0.seg.png", "dir"]
        assert sorted(operations.readdir("/dir", 0)[2:]) == ["1.txt", "sub"]
        assert operations.readdir("/dir/sub/", 0)[2:] == ["2.txt"]
        file, folder = operations.getattr("/dir/1.txt"), operations.getattr("/dir")
        assert file["st_size"] == 3 and stat.S_ISREG(file["st_mode"]) and file["st_mode"] & 0o777 == 0o444
        assert stat.S_ISDIR(folder["st_mode"]) and stat.S_ISDIR(operations.getattr("/")["st_mode"])
        assert operations.open("/0.txt", os.O_RDONLY) == 0 and operations.read("/0.txt", 3, 1, 0) == b"ero"
        assert operations.read("/dir/1.txt", 2, 2, 0) == b"e" and operations.read("/dir/1.txt", 9, 70, 0) == b""
        view = operations.view
        found = operations.statfs("/")
        assert found["f_files"] == view.files == 5 and (view.doubled, view.total_size) == (1, 15)
        assert (found["f_blocks"], found["f_bsize"], found["f_frsize"]) == (1, 512, 512)

    @pytest.mark.parametrize("path", ["1.txt", "0.png", "0", "dir/1", "dir/none", "dir/1.txt/x", "0.txt.gz"])
    def test_what_is_not(self, operations: FileOperations, path: str) -> None:
        assert number_of(operations.getattr, f"/{path}") == errno.ENOENT == number_of(operations.readdir, f"/{path}", 0)
        assert number_of(operations.open, "/0.txt", os.O_RDWR) == errno.EROFS
        assert number_of(operations.read, "/dir", 1, 0, 0) == errno.EISDIR

    def test_a_folder_for_each_sample(self, operations: FileOperations) -> None:
        view = FileView(operations.view.source.path, sample_folders=True)
        assert sorted(view.listing("")) == ["0", "dir"] and sorted(view.listing("dir")) == ["1", "sub"]
        assert [*view.listing("0")] == ["txt", "seg.png"] and view.read("0/seg.png", 9) == b"123"
        assert view.entry("0").size == 7 and view.read("dir/sub/2/txt", 9) == b""
        for path in ("2", "0/png", "dir/1/txt/x"):
            with pytest.raises(FileNotFoundError):
                view.entry(path)

    def test_json_lines(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"b": 22}\n')
        view = FileView(str(tmp_path / "a.jsonl"))
        assert [*view.listing("")] == ["0.json", "1.json"] and view.read("1.json", 99) == b'{"b": 22}'

    @pytest.mark.parametrize("sample_folders", [False, True])
    def test_keys_that_are_no_paths(self, tmp_path: Path, sample_folders: bool) -> None:
        keys = ["/abs", "../up", "./dot", "x//y", "ok"]
        write_dataset(tmp_path / "odd", {"a.tar": [(key, {"txt": b"t"}) for key in keys]})
        operations = FileOperations(FileView(str(tmp_path / "odd"), sample_folders=sample_folders))
        assert operations.readdir("/", 0) == [".", "..", "ok" if sample_folders else "ok.txt"]

    def test_a_key_that_is_the_folder_of_another(self, tmp_path: Path) -> None:
        write_dataset(tmp_path / "nested", {"a.tar": [("a", {"txt": b"1"}), ("a/b", {"txt": b"2"})]})
        operations = FileOperations(FileView(str(tmp_path / "nested"), sample_folders=True))
        assert operations.readdir("/a", 0) == [".", "..", "txt", "b"]
        assert operations.read("/a/txt", 9, 0, 0) == b"1" and operations.read("/a/b/txt", 9, 0, 0) == b"2"

    def test_a_shard_that_is_gone(self, operations: FileOperations) -> None:
        os.unlink(os.path.join(operations.view.source.path, "a.tar"))
        assert number_of(operations.read, "/0.txt", 3, 0, 0) == errno.EIO


def _fuse_that_records(calls: list[Any]) -> ModuleType:
    fuse = ModuleType("mfusepy")
    vars(fuse).update(Operations=object, FUSE=lambda *arguments, **options: calls.append((arguments, options)))
    return fuse


class TestCommand:
    def test_mounting(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[Any] = []
        monkeypatch.setitem(sys.modules, "mfusepy", _fuse_that_records(calls))
        path = text_dataset(tmp_path / "set", 5)
        assert "5 samples, 5 files" in output_of("mount", path, tmp_path / "point", "-s", "-d", "-w")
        ((operations, point), options) = calls[0]
        assert (point, options["foreground"], options["ro"]) == (str(tmp_path / "point"), False, True)
        assert len(operations.readdir("/", 0)) == 7 and operations.view.sample_folders

    def test_without_fuse(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "mfusepy", None)
        monkeypatch.setitem(sys.modules, "fuse", None)
        said = refusal_of("mount", text_dataset(tmp_path / "set", 5), tmp_path / "point")
        assert "energon-lite[mount]" in said and not (tmp_path / "point").exists()
        (tmp_path / "a.yaml").write_text("splits: {}")
        assert "mount one of its data sets" in refusal_of("mount", tmp_path / "a.yaml", tmp_path / "point")

    def test_a_folder_with_files_is_not_covered(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "mfusepy", _fuse_that_records([]))
        path = text_dataset(tmp_path / "set", 5)
        assert "the mountpoint is not empty" in refusal_of("mount", path, path)
