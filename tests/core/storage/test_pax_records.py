from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.storage import tar_members as module
from energon_lite.storage.tar_members import SPARSE, pax_records


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
