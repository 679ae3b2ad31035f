from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from energon_lite.errors import MissingShardError
from energon_lite.storage import tar_members as module
from energon_lite.storage.tar_members import SPARSE, Member, MemberColumns, pax_records
from energon_lite.storage.tar_scan import SampleColumns, scan_shard, split_member_name
from tests.testing import write_members


def test_scan(tmp_path: Path) -> None:
    write_members(
        tmp_path / "s/a.tar",
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
    assert scan.all_keys() == ["0", "f/1", "0"]
    assert scan.part_names == ("txt", "cls")
    # Each member takes 1024 bytes; the first one is skipped.
    assert scan.headers.tolist() == [1024, 4096, 5120]
    assert scan.first_part.tolist() == [0, 2, 3, 4]
    assert scan.parts.tolist() == [[1536, 4, 0], [2560, 1, 1], [4608, 3, 0], [5632, 5, 0]]
    assert (scan.end, scan.size) == (6144, (tmp_path / "s/a.tar").stat().st_size)


def test_names_that_are_not_text_survive(tmp_path: Path) -> None:
    write_members(tmp_path / "a.tar", [("caf\udce9.txt", b"")])
    assert scan_shard(str(tmp_path), "a.tar").all_keys()[0] == "caf\udce9"


def test_a_missing_shard(tmp_path: Path) -> None:
    with pytest.raises(MissingShardError, match=r"gone\.tar"):
        scan_shard(str(tmp_path), "gone.tar")


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


def one_by_one(names: list[str]) -> tuple[list[str], list[int], list[int], list[str]]:
    """The rule, member by member: keys, member of each sample's first part, part numbers, part names."""
    keys: list[str] = []
    first: list[int] = []
    numbers: list[int] = []
    table: dict[str, int] = {}
    for number, name in enumerate(names):
        split = split_member_name(name)
        if split is None:
            continue
        key, part = split
        if not keys or key != keys[-1]:
            keys.append(key)
            first.append(number)
        numbers.append(table.setdefault(part, len(table)))
    return keys, first, numbers, list(table)


names = st.one_of(
    st.text(st.sampled_from("ab./_"), min_size=1, max_size=9),
    st.sampled_from(
        ["k.a", "k.b", "k.a.b", "f/k.a", "f/.a", "f.x/.a", "__m__/k.a", "caf\udce9.é", "k." + "p" * 40, "k.\0a"]
    ),
)


@given(st.lists(names, max_size=20), st.lists(st.integers(0, 20), max_size=3))
@example(["k.a", "none", "k.b", "k.c"], [2])
@example(["k.a", "k\0.a", "k.a\0", "k.a"], [])
@example([f"k.{number}" for number in range(100)] * 2, [])
def test_samples_of_columns_are_those_of_the_rule(members: list[str], cuts: list[int]) -> None:
    keys, first, numbers, part_names = one_by_one(members)
    found = SampleColumns()
    rows = [Member(1000 * number, name, 1000 * number + 512, number) for number, name in enumerate(members)]
    for start, stop in pairwise(sorted({0, *cuts, len(rows)})):
        found.add(MemberColumns.from_members(rows[start:stop]))
    fields = found.fields()
    stops, text = fields["key_offsets"].tolist(), fields["keys"]
    assert [text[start:stop].decode("utf-8", "surrogateescape") for start, stop in pairwise(stops)] == keys
    assert fields["headers"].tolist() == [1000 * number for number in first]
    assert fields["part_names"] == tuple(part_names)
    assert fields["parts"][:, 2].tolist() == numbers
    kept = [number for number, name in enumerate(members) if split_member_name(name)]
    assert fields["parts"][:, :2].tolist() == [[1000 * number + 512, number] for number in kept]
    assert fields["first_part"].tolist() == [*(kept.index(number) for number in first), len(kept)]
    assert {value.dtype for value in fields.values() if isinstance(value, np.ndarray)} == {np.dtype(np.int64)}


def record(key: str, value: str) -> bytes:
    """A record with its own length in front."""
    rest = f" {key}={value}\n".encode()
    length = len(rest)
    while length != len(str(length)) + len(rest):
        length = len(str(length)) + len(rest)
    return str(length).encode() + rest


keys = st.sampled_from(["path", "size", "mtime", "atime", "comment", "GNU.sparse.major"])


@given(st.lists(st.tuples(keys, st.text(st.sampled_from("0123456789"), min_size=1, max_size=12)), max_size=4))
def test_records_are_found(records: list[tuple[str, str]]) -> None:
    text = b"".join(record(key, value) for key, value in records)
    wanted = {SPARSE if key.startswith("GNU") else key: value for key, value in records}
    expected = {key: value for key, value in wanted.items() if key in ("path", "size", SPARSE)}
    assert pax_records(text) == pax_records(text + bytes(100)) == expected


@pytest.mark.parametrize(
    "text",
    [
        b"x",
        b"10 mtime=1",
        b"99 mtime=1\n",
        b"3 a\n",
        b"10 size=ab\n",
        record("size", "9" * 5000),
        b"11 mtime=1\n1 x",
        b"12 mtime=1.5\n",
        b"1\n mtime=1\n",
    ],
)
def test_what_cannot_be_parsed(text: bytes) -> None:
    with pytest.raises(ValueError, match="pax"):
        pax_records(text)


@given(
    st.integers(0, 20), st.sampled_from([b" mtime=1.5\n", b" atime=\n", b" ctime=.\n", b" mtime=1\n\n", b" mtime=12"])
)
def test_the_short_way_gives_the_same(length: int, rest: bytes) -> None:
    def outcome() -> object:
        try:
            return pax_records(b"%d" % length + rest)
        except ValueError as error:
            return str(error)

    short = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ONE_TIME", re.compile(b"never"))
        assert outcome() == short
