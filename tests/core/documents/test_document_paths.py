from __future__ import annotations

from pathlib import Path

import pytest

from energon_lite.documents.paths import is_url, local_path, missing_file_fix
from energon_lite.errors import UsageError


def test_urls() -> None:
    assert is_url("s3://bucket/key") and is_url("msc://profile/x")
    assert not is_url("file:///data/x") and local_path("file:///data/x") == "/data/x"
    assert not is_url("/data/x") and not is_url("C:/x") and not is_url("a:b")

    assert local_path("msc://__filesystem__/data/x") == "/data/x" and local_path("msc://store/x") == "msc://store/x"
    with pytest.warns(FutureWarning, match="rclone:// is deprecated"):
        assert local_path("rclone://store/x") == "msc://store/x"


def test_the_nearest_name_beside_it(room: Path) -> None:
    assert missing_file_fix(str(room / "digit"), "x") == f"did you mean {str(room / 'digits')!r}?"


def test_the_nearest_name_on_the_way(room: Path) -> None:
    assert missing_file_fix(str(room / "sbu" / "photos"), "x") == f"did you mean {str(room / 'sub')!r}?"


def test_otherwise_what_is_there(room: Path) -> None:
    folder = room / "sub"
    assert missing_file_fix(str(folder / "zzz"), "look") == f"look; the folder {str(folder)!r} holds: photos"


def test_hidden_names_and_long_lists_are_left_out(tmp_path: Path) -> None:
    for name in ("a1", "a2", "a3", "a4", "a5", "a6", ".hidden"):
        (tmp_path / name).mkdir()
    assert missing_file_fix(str(tmp_path / "zzz"), "look").endswith("holds: a1, a2, a3, a4, a5, ...")


def test_nothing_there(tmp_path: Path) -> None:
    assert missing_file_fix(str(tmp_path / "zzz" / "y"), "look") == "look"


def test_cached_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVDATASET_CACHE_DIR", "/cache/")
    assert local_path("dss://coco@1.2/train") == "/cache/coco/1.2/train"
    assert local_path("dss://a@b@2") == "/cache/a@b/2"
    monkeypatch.setenv("NVDATASET_CACHE_DIR", "s3://bucket/cache")
    assert local_path("dss://coco@1.2") == "s3://bucket/cache/coco/1.2" and is_url(local_path("dss://coco@1.2"))
    for wrong in ("dss://coco/train", "dss://@1/train", "dss://coco@/train", "dss://..@1/x", "dss://coco@../x"):
        with pytest.raises(UsageError, match="name@version"):
            local_path(wrong)
    monkeypatch.delenv("NVDATASET_CACHE_DIR")
    with pytest.raises(UsageError, match="NVDATASET_CACHE_DIR is not set"):
        local_path("dss://coco@1.2")
