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
from tests.testing import invoke


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def operations(tmp_path: Path) -> FileOperations:
    write_dataset(tmp_path / "set", {"a.tar": [("k/0", {"txt": b"zero"}), ("1", {"txt": b"one"})]})
    return FileOperations(FileView(str(tmp_path / "set")))


def number_of(call: Any, *arguments: Any) -> int | None:
    with pytest.raises(OSError) as caught:
        call(*arguments)
    return caught.value.errno


class TestOperations:
    def test_what_is_there(self, operations: FileOperations) -> None:
        assert operations.readdir("/", 0) == [".", "..", "k", "1.txt"] and operations.readdir("/k", 0)[2:] == ["0.txt"]
        file, folder = operations.getattr("/1.txt"), operations.getattr("/k")
        assert file["st_size"] == 3 and stat.S_ISREG(file["st_mode"]) and file["st_mode"] & 0o777 == 0o444
        assert stat.S_ISDIR(folder["st_mode"]) and stat.S_ISDIR(operations.getattr("/")["st_mode"])
        assert operations.open("/k/0.txt", os.O_RDONLY) == 0 and operations.read("/k/0.txt", 3, 1, 0) == b"ero"
        assert operations.statfs("/")["f_files"] == 2

    def test_what_is_not(self, operations: FileOperations) -> None:
        assert number_of(operations.getattr, "/2.txt") == errno.ENOENT == number_of(operations.readdir, "/none", 0)
        assert number_of(operations.open, "/1.txt", os.O_RDWR) == errno.EROFS
        assert number_of(operations.read, "/k", 1, 0, 0) == errno.EISDIR

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
        assert number_of(operations.read, "/1.txt", 3, 0, 0) == errno.EIO


def _fuse_that_records(calls: list[Any]) -> ModuleType:
    fuse = ModuleType("mfusepy")
    vars(fuse).update(Operations=object, FUSE=lambda *arguments, **options: calls.append((arguments, options)))
    return fuse


class TestCommand:
    def test_mounting(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[Any] = []
        monkeypatch.setitem(sys.modules, "mfusepy", _fuse_that_records(calls))
        path = text_dataset(tmp_path / "set", 5)
        result = invoke("mount", path, tmp_path / "point", "-s", "-d", "-w")
        assert result.exit_code == 0 and "5 samples, 5 files" in result.output
        ((operations, point), options) = calls[0]
        assert (point, options["foreground"], options["ro"]) == (str(tmp_path / "point"), False, True)
        assert len(operations.readdir("/", 0)) == 7 and operations.view.sample_folders

    def test_without_fuse(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "mfusepy", None)
        monkeypatch.setitem(sys.modules, "fuse", None)
        result = invoke("mount", text_dataset(tmp_path / "set", 5), tmp_path / "point")
        assert result.exit_code == 1 and "energon-lite[mount]" in result.output and not (tmp_path / "point").exists()
        (tmp_path / "a.yaml").write_text("splits: {}")
        result = invoke("mount", tmp_path / "a.yaml", tmp_path / "point")
        assert result.exit_code == 1 and "mount one of its data sets" in result.output

    def test_a_folder_with_files_is_not_covered(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "mfusepy", _fuse_that_records([]))
        path = text_dataset(tmp_path / "set", 5)
        result = invoke("mount", path, path)
        assert result.exit_code == 1 and "the mountpoint is not empty" in result.output
