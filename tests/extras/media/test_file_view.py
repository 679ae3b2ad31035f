from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from energon_lite.extras.media.mount_command import FileView


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path: Path, write_dataset: Callable[..., Path]) -> Path:
    shards = {
        "a.tar": [("0", {"txt": b"zero", "seg.png": b"123"}), ("dir/1", {"txt": b"one"})],
        "b.tar": [("dir/sub/2", {"txt": b""}), ("0", {"txt": b"again"})],
    }
    return write_dataset(tmp_path / "set", shards)


class TestFlat:
    def test_listings(self, data: Path) -> None:
        view = FileView(str(data))
        assert [*view.listing("")] == ["0.txt", "0.seg.png", "dir"]
        assert sorted(view.listing("dir")) == ["1.txt", "sub"] and [*view.listing("/dir/sub/")] == ["2.txt"]
        assert (view.doubled, view.files, view.total_size) == (1, 5, 15)

    def test_files(self, data: Path) -> None:
        view = FileView(str(data))
        assert view.read("0.txt", 100) == b"zero" and view.read("0.seg.png", 2, 1) == b"23"
        assert view.read("dir/1.txt", 2, 2) == b"e" and view.read("dir/1.txt", 2, 3) == b"" == view.read(
            "dir/1.txt", 9, 70
        )
        assert view.entry("dir/sub/2.txt").size == 0 and view.entry("dir").part is None is view.entry("").part
        with pytest.raises(IsADirectoryError):
            view.read("dir", 1)

    @pytest.mark.parametrize("path", ["1.txt", "0.png", "0", "dir/1", "dir/none", "dir/1.txt/x", "0.txt.gz"])
    def test_what_is_not_there(self, data: Path, path: str) -> None:
        with pytest.raises(FileNotFoundError):
            FileView(str(data)).entry(path)
        with pytest.raises(FileNotFoundError):
            FileView(str(data)).listing(path)


class TestSampleFolders:
    def test_listings_and_files(self, data: Path) -> None:
        view = FileView(str(data), sample_folders=True)
        assert sorted(view.listing("")) == ["0", "dir"] and sorted(view.listing("dir")) == ["1", "sub"]
        assert [*view.listing("0")] == ["txt", "seg.png"] and view.read("0/seg.png", 9) == b"123"
        assert view.entry("0").size == 7 and view.read("dir/sub/2/txt", 9) == b""
        for path in ("2", "0/png", "dir/1/txt/x"):
            with pytest.raises(FileNotFoundError):
                view.entry(path)


def test_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"b": 22}\n')
    view = FileView(str(tmp_path / "a.jsonl"))
    assert [*view.listing("")] == ["0.json", "1.json"] and view.read("1.json", 99) == b'{"b": 22}'
