from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from energon_lite.storage.tar_members import Member, MemberColumns
from energon_lite.storage.tar_scan import SampleColumns, split_member_name


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
