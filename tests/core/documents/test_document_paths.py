from __future__ import annotations

import re
from itertools import accumulate, islice
from pathlib import Path

import pytest
from braceexpand import braceexpand
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.documents.paths import MAX_NAMES, _count_names, expand_braces, is_url, local_path, missing_file_fix
from energon_lite.errors import UsageError


def test_urls() -> None:
    assert is_url("s3://bucket/key") and is_url("msc://profile/x")
    assert not is_url("file:///data/x") and local_path("file:///data/x") == "/data/x"
    assert not is_url("/data/x") and not is_url("C:/x") and not is_url("a:b")

    assert local_path("msc://__filesystem__/data/x") == "/data/x" and local_path("msc://store/x") == "msc://store/x"
    with pytest.warns(FutureWarning, match="rclone:// is deprecated"):
        assert local_path("rclone://store/x") == "msc://store/x"


@pytest.mark.parametrize(
    ("missing", "fix"),
    [
        ("digit", "did you mean '{}/digits'?"),
        ("sbu/photos", "did you mean '{}/sub'?"),
        ("sub/zzz", "look; the folder '{}/sub' holds: photos"),
        ("prose/zzz/y", "look"),
    ],
)
def test_what_to_do_about_a_missing_file(missing: str, fix: str, room: Path) -> None:
    assert missing_file_fix(str(room / missing), "look") == fix.format(room)


def test_hidden_names_and_long_lists_are_left_out(tmp_path: Path) -> None:
    for name in ("a1", "a2", "a3", "a4", "a5", "a6", ".hidden"):
        (tmp_path / name).mkdir()
    assert missing_file_fix(str(tmp_path / "zzz"), "look").endswith("holds: a1, a2, a3, a4, a5, ...")


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


PIECES = (*"{},afZ7\\/", *("..", "12", "003", "-2", "{0..3}", "{a..c}", "{x,y}", "{5..1..2}"))


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_the_names_are_those_of_bash_and_their_number_is_known_before(pattern: str) -> None:
    plain = re.sub(r"\\.", "__", pattern)
    try:
        expected = list(islice(braceexpand(pattern), MAX_NAMES + 1))
    except ValueError:
        expected = []
    if not expected or min(accumulate((char == "{") - (char == "}") for char in plain or "x")) < 0:
        with pytest.raises(ValueError, match="do not match"):
            expand_braces(pattern)
        return
    if len(expected) > MAX_NAMES:
        with pytest.raises(ValueError, match="which are too many"):
            expand_braces(pattern)
        return
    assert expand_braces(pattern) == expected
    if "\\" not in pattern:
        assert _count_names(pattern) == len(expected)
    if len(expected) > 1:
        with pytest.raises(ValueError, match="stand for"):
            expand_braces(pattern, 1)
