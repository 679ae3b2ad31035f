from __future__ import annotations

from pathlib import Path

from energon_lite.documents.paths import is_url, local_path, missing_file_fix


def test_urls() -> None:
    assert is_url("s3://bucket/key") and is_url("msc://profile/x")
    assert not is_url("file:///data/x") and local_path("file:///data/x") == "/data/x"
    assert not is_url("/data/x") and not is_url("C:/x") and not is_url("a:b")


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
