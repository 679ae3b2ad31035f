from __future__ import annotations

import tarfile
from collections.abc import Callable
from itertools import accumulate, groupby
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from energon_lite.errors import MissingShardError
from energon_lite.storage.tar.tar_scan import scan_shard, split_member_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("0001.jpg", ("0001", "jpg")),
        ("0001.seg.png", ("0001", "seg.png")),
        ("a.b/0001.jpg", ("a.b/0001", "jpg")),
        ("./0001.jpg", ("./0001", "jpg")),
        ("0001.", ("0001", "")),
        ("readme", None),
        ("a.b/readme", None),
        (".hidden", None),
        ("folder/.hidden.txt", ("folder/", "hidden.txt")),
        ("folder.x/.hidden", None),
        ("__meta__", None),
        ("__meta__/0001.jpg", None),
        ("__meta__x/0001.jpg", ("__meta__x/0001", "jpg")),
        ("a/__meta__/0001.jpg", ("a/__meta__/0001", "jpg")),
        ("__0001.jpg", ("__0001", "jpg")),
    ],
)
def test_split_member_name(name: str, expected: tuple[str, str] | None) -> None:
    assert split_member_name(name) == expected


names = st.one_of(
    st.text(st.sampled_from("ab./_"), min_size=1, max_size=9).filter(lambda name: not name.endswith("/")),
    st.sampled_from(["k.a", "k.b", "k.a.b", "f/k.a", "f/.a", "f.x/.a", "__m__/k.a", "caf\udce9.é", "k." + "p" * 40]),
)


@given(st.lists(names, max_size=20))
@example(["k.a", "none", "k.b", "k.c"])
@example([f"k.{number}" for number in range(100)] * 2)
def test_neighbours_with_equal_keys_are_a_sample(
    make_tar: Callable[..., Path], tmp_path: Path, members: list[str]
) -> None:
    make_tar("a.tar", [(name, b"") for name in members])
    with tarfile.open(tmp_path / "a.tar", errors="surrogateescape") as tar:
        places = [(member.offset, member.offset_data) for member in tar]
    splits = [(split_member_name(name), *place) for name, place in zip(members, places, strict=True)]
    kept = [(*split, header, offset) for split, header, offset in splits if split is not None]
    groups = [list(group) for _, group in groupby(kept, key=lambda member: member[0])]
    scan = scan_shard(str(tmp_path), "a.tar")
    assert scan.all_keys() == [group[0][0] for group in groups]
    assert scan.headers.tolist() == [group[0][2] for group in groups]
    assert scan.first_part.tolist() == [0, *accumulate(map(len, groups))]
    assert scan.part_names == tuple(dict.fromkeys(part for _, part, *_ in kept))
    expected = [[offset, 0, scan.part_names.index(part)] for _, part, _, offset in kept]
    assert scan.parts.tolist() == expected


def test_scan(make_tar: Callable[..., Path], tmp_path: Path) -> None:
    make_tar(
        "s/a.tar",
        [
            ("__meta__/x.txt", b"skip"),
            ("0.txt", b"zero"),
            ("0.cls", b"0"),
            ("LICENSE", b"skip"),
            ("f/1.txt", b"one"),
            ("0.txt", b"again"),
        ],
    )
    scan = scan_shard(str(tmp_path), "s/a.tar")
    assert [scan.key(i) for i in range(scan.samples)] == ["0", "f/1", "0"]
    assert scan.part_names == ("txt", "cls")
    # Each member takes 1024 bytes; the first one is skipped.
    assert scan.headers.tolist() == [1024, 4096, 5120]
    assert scan.first_part.tolist() == [0, 2, 3, 4]
    assert scan.parts.tolist() == [[1536, 4, 0], [2560, 1, 1], [4608, 3, 0], [5632, 5, 0]]
    assert (scan.end, scan.size) == (6144, (tmp_path / "s/a.tar").stat().st_size)


def test_names_that_are_not_text_survive(make_tar: Callable[..., Path], tmp_path: Path) -> None:
    make_tar("a.tar", [("caf\udce9.txt", b"")])
    assert scan_shard(str(tmp_path), "a.tar").key(0) == "caf\udce9"


def test_a_missing_shard(tmp_path: Path) -> None:
    with pytest.raises(MissingShardError, match=r"gone\.tar"):
        scan_shard(str(tmp_path), "gone.tar")
