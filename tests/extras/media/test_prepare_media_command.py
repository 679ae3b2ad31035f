from __future__ import annotations

from pathlib import Path

import pytest

from energon_lite.extras.media.metadata import MediaTable
from tests.media_files import film, sound
from tests.testing import command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.mp4").write_bytes(film("mp4"))
    (tmp_path / "cut.wav").write_bytes(sound("wav")[:-1000])
    return tmp_path


def run(*arguments: object) -> tuple[int, str]:
    return command(*arguments)


def test_a_folder(folder: Path) -> None:
    code, said = run("prepare-media", folder, "--media-metadata-by-extension", "--tmp-path", folder)
    assert code == 0 and "Stored the metadata of 1 media; 1 are damaged" in said and "cut.wav: " in said
    assert MediaTable(str(folder)).get("a.mp4") is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "no rule that finds media is given"),
        (("--media-metadata-by-header", "--media-metadata-by-extension"), "exactly one"),
        (("--media-metadata-by-glob", "*.none"), "no file in the folder"),
    ],
)
def test_what_is_wrong(folder: Path, options: tuple[str, ...], words: str) -> None:
    code, said = run("prepare-media", folder, *options)
    assert code == 1 and words in said


def test_prepare_with_indexes_only(folder: Path) -> None:
    code, said = run("prepare", folder, "--tar-index-only", "--media-metadata-by-header")
    assert code == 1 and "--tar-index-only" in said
