"""Preparing by Energon's function: media, and keys that collide."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from energon_lite.extras.energon import BaseWebdatasetFactory
from energon_lite.extras.energon.compat.documents import prepare_filesystem_dataset
from energon_lite.extras.media import ImageMetadata, MediaFilterConfig, SystemFileStore, WebdatasetFileStore
from tests.testing import write_tar


def picture(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.zeros((height, width, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def test_media_of_shards_and_of_folders(tmp_path: Path) -> None:
    samples = [("0", {"png": picture(4, 3), "txt": b"small"}), ("1", {"png": picture(9, 8), "txt": b""})]
    write_tar(tmp_path / "set/a.tar", samples)
    parts = BaseWebdatasetFactory.prepare_dataset(
        tmp_path / "set",
        ["a.tar"],
        split_parts_ratio=[("train", 1.0)],
        workers=1,
        media_filter=MediaFilterConfig.parse(None, False, True),
    )
    assert parts == {"png", "txt"}
    found = WebdatasetFileStore(tmp_path / "set").get_media_metadata("1.png")
    assert isinstance(found, ImageMetadata) and (found.width, found.height) == (9, 8)
    (tmp_path / "files").mkdir()
    (tmp_path / "files/b.png").write_bytes(picture(5, 6))
    by_glob = MediaFilterConfig.parse("*.png", False, False)
    assert prepare_filesystem_dataset(tmp_path / "files", by_glob, progress=False, workers=1) == 1
    found = SystemFileStore(tmp_path / "files").get_media_metadata("b.png")
    assert isinstance(found, ImageMetadata) and (found.width, found.height) == (5, 6)


def test_keys_that_collide_are_made_unique(tmp_path: Path) -> None:
    for name in ("a.tar", "b.tar"):
        write_tar(tmp_path / name, [("0", {"txt": name.encode()})])
    options = {"split_parts_ratio": [("train", 1.0)], "workers": 1, "fix_duplicates": True}
    BaseWebdatasetFactory.prepare_dataset(tmp_path, ["{a,b}.tar"], **options)
    store = WebdatasetFileStore(tmp_path)
    assert [store[f"{name}/0.txt"][0] for name in ("a.tar", "b.tar")] == [b"a.tar", b"b.tar"]
