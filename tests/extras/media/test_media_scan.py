"""The metadata of media: found, stored, kept, and read again."""

from __future__ import annotations

import io
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from energon_lite.errors import DataIndexError, EmptyDatasetError, MissingEntryError, ShardChangedError, UsageError
from energon_lite.extras.media import AVMetadata, ImageMetadata, MediaFilterConfig, media_scan
from energon_lite.extras.media.media_scan import prepare_media
from energon_lite.extras.media.metadata import (
    MediaMetadataType,
    MediaTable,
    deserialize_media_metadata,
    serialize_media_metadata,
)
from energon_lite.storage.files.shard_store import shared_store
from energon_lite.storage.prepare import prepare_dataset
from energon_lite.storage.sharded_job import Ranks
from tests.accidents import interrupted
from tests.media_files import film, sound
from tests.testing import output_of, refusal_of

BY_NAME = MediaFilterConfig.parse(None, False, True)
BY_CONTENT = MediaFilterConfig.parse(None, True, False)


def glob(patterns: str) -> MediaFilterConfig:
    return MediaFilterConfig.parse(patterns, False, False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "media"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "deep" / "er" / "a.mp4").write_bytes(film("mp4"))
    (root / "b.WAV").write_bytes(sound("wav"))
    (root / "cut.mkv").write_bytes(film("mkv")[:-2000])
    (root / "no.png").write_bytes(b"\x89PNG and nothing more")
    (root / "about.txt").write_text("text")
    return root


@pytest.mark.parametrize("workers", [1, 2])
def test_a_plain_folder(folder: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_scan, "_TOGETHER", 1)
    monkeypatch.setattr(media_scan, "_ALONE", 0.0)
    told: list[tuple[int, int, str]] = []
    report = prepare_media(folder, BY_NAME, workers=workers, progress=lambda *one: told.append(one))
    assert report.found == 2 and [entry for entry, _ in report.broken] == ["cut.mkv", "no.png"]
    assert "bytes are missing" in report.broken[0][1] and told[-1] == (4, 4, "2 media")
    found = MediaTable(str(folder)).get("deep/er/a.mp4")
    assert isinstance(found, AVMetadata) and found.video_num_frames == 40
    with pytest.raises(MissingEntryError, match=r"cut\.mkv"):
        MediaTable(str(folder)).get("cut.mkv")
    assert sorted(path.name for path in (folder / ".nv-meta").iterdir()) == ["index.sqlite"]


def test_what_is_taken_for_a_medium(folder: Path) -> None:
    assert prepare_media(folder, glob("*.wav")).found == 1
    assert prepare_media(folder, glob("deep/*")).found == 1
    report = prepare_media(folder, BY_CONTENT)
    assert report.found == 2 and [entry for entry, _ in report.broken] == ["cut.mkv", "no.png"]
    with closing(sqlite3.connect(folder / ".nv-meta" / "index.sqlite")) as database:
        filters = database.execute("SELECT strategy, patterns FROM media_filters").fetchall()
    data = (folder / "b.WAV").read_bytes()
    for source, name in ((folder / "b.WAV", None), (data, "b.wav"), (io.BytesIO(data), "b.wav")):
        assert BY_NAME.extract_metadata(source, name) == MediaTable(str(folder)).get("b.WAV")
    assert BY_NAME.extract_metadata(data[:-9], "b.wav") is BY_NAME.extract_metadata(data, "b.txt") is None
    with pytest.raises(UsageError, match="have no name"):
        BY_NAME.extract_metadata(data)
    assert filters == [("GLOB", "*.wav"), ("GLOB", "deep/*"), ("HEADER", "")]
    assert MediaTable(str(folder)).get("b.WAV") is not None
    with pytest.raises(EmptyDatasetError, match="no file"):
        prepare_media(folder, glob("*.none"))
    for given in ((None, False, False), ("*.png", True, False)):
        with pytest.raises(UsageError, match="exactly one"):
            MediaFilterConfig.parse(*given)
    with pytest.raises(UsageError, match="folder"):
        prepare_media(folder / "b.WAV", BY_NAME)


def test_a_run_that_was_killed_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_scan, "_TOGETHER", 1)
    with interrupted(media_scan._Media, "do", lambda *_: len(done) == 2) as done, pytest.raises(KeyboardInterrupt):
        prepare_media(folder, BY_NAME, workers=1)
    assert not (folder / ".nv-meta" / "index.sqlite").exists()
    with interrupted(media_scan._Media, "do") as rest:
        report = prepare_media(folder, BY_NAME, workers=1, tmp_path=str(tmp_path))
    assert len(done) == len(rest) == 2 and len({unit for _, unit in done + rest}) == 4
    assert report.found == 2 and MediaTable(str(folder)).get("deep/er/a.mp4")


def test_shards_and_ranks(tmp_path: Path, make_tar: Any) -> None:
    for name in "abc":
        make_tar(f"films/{name}.tar", [(f"{name}0.mp4", film("mp4")), (f"{name}0.txt", b"x"), (f"{name}1.txt", b"y")])
    root = tmp_path / "films"
    prepare_dataset(root, split_ratio="1,0,0")
    reports = [prepare_media(root, BY_NAME, ranks=Ranks(rank, 2, timeout=20)) for rank in (1, 0)]
    assert [report.found for report in reports] == [1, 3]
    assert MediaTable(str(root)).get("c0.mp4") is not None
    with pytest.raises(MissingEntryError):
        MediaTable(str(root)).get("c0.txt")
    (root / "b.tar").write_bytes((root / "b.tar").read_bytes() + bytes(512))
    shared_store().close()
    with pytest.raises(ShardChangedError):
        prepare_media(root, BY_NAME, workers=1)


def test_a_corrected_shard_is_read_again(tmp_path: Path, make_tar: Any) -> None:
    """Its size and its first block are those of the shard before."""
    root = tmp_path / "pictures"
    for number, (width, height) in enumerate([(4, 8), (8, 4)]):
        file = io.BytesIO()
        Image.new("RGB", (width, height)).save(file, "png")
        make_tar(f"new/{number}.tar", [("0.png", file.getvalue().ljust(200, b"\0"))])
        root.mkdir(exist_ok=True)
        (tmp_path / "new" / f"{number}.tar").replace(root / "a.tar")
        prepare_dataset(root, split_ratio="1,0,0", force_overwrite=True)
        prepare_media(root, BY_NAME, workers=1)
        found = MediaTable(str(root)).get("0.png")
        assert isinstance(found, ImageMetadata) and (found.width, found.height) == (width, height)


def test_what_cannot_be_read(folder: Path) -> None:
    with pytest.raises(UsageError, match="no media metadata"):
        MediaTable(str(folder)).get("b.WAV")
    prepare_media(folder, BY_NAME)
    (folder / ".nv-meta" / "index.sqlite").write_bytes(b"no database" * 1000)
    for act in (lambda: MediaTable(str(folder)).get("b.WAV"), lambda: prepare_media(folder, BY_NAME)):
        with pytest.raises(DataIndexError):
            act()


def test_metadata_as_text() -> None:
    found = ImageMetadata(width=3, height=2, format="PNG", mode="RGB")
    kind, text = serialize_media_metadata(found)
    assert kind is MediaMetadataType.IMAGE and text == '{"width":3,"height":2,"format":"PNG","mode":"RGB"}'
    assert deserialize_media_metadata("image", text) == found
    assert deserialize_media_metadata("av", "") == AVMetadata()
    assert deserialize_media_metadata("av", '{"later":1}') == AVMetadata()
    for kind_, wrong in (("smell", "{}"), ("av", "[]"), ("image", "{}"), ("image", "{")):
        with pytest.raises(DataIndexError):
            deserialize_media_metadata(kind_, wrong)


def test_on_the_command_line(folder: Path) -> None:
    said = output_of("prepare-media", folder, "--media-metadata-by-extension", "--tmp-path", folder)
    assert "2 media; damaged, and without metadata: 2." in said and "cut.mkv: " in said
    assert MediaTable(str(folder)).get("b.WAV") is not None
    for name, options, words in (
        ("prepare-media", [], "no rule that finds media is given"),
        ("prepare-media", ["--media-metadata-by-header", "--media-metadata-by-extension"], "exactly one"),
        ("prepare-media", ["--media-metadata-by-glob", "*.none"], "no file in the folder"),
        ("prepare", ["--tar-index-only", "--media-metadata-by-header"], "--tar-index-only"),
    ):
        assert words in refusal_of(name, folder, *options)
