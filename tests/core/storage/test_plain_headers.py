"""What is parsed as arrays is, in every field, note and error, what is parsed header by header."""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from energon_lite.errors import ShardFormatError
from energon_lite.storage import tar_headers, tar_members
from energon_lite.storage.tar_headers import TarHeaders
from energon_lite.storage.tar_members import Member, PlainHeaders
from tests.testing import calls_here

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


@dataclass(frozen=True)
class Entry:
    """A member to write."""

    name: str = "a.txt"
    size: int = 10
    kind: bytes = tarfile.REGTYPE
    tar_format: int = tarfile.USTAR_FORMAT
    pax: tuple[tuple[str, str], ...] = ()
    mtime: float = 0
    changes: tuple[tuple[int, bytes], ...] = ()
    only_extension: bool = False

    def blocks(self) -> bytes:
        info = tarfile.TarInfo(self.name)
        info.type, info.mtime, info.pax_headers = self.kind, self.mtime, dict(self.pax)
        info.size = self.size
        header = bytearray(info.tobuf(self.tar_format, errors="surrogateescape"))
        start = len(header) - 512
        for position, data in self.changes:
            header[start + position : start + position + len(data)] = data
        if self.changes:
            checksum = sum(header[start : start + 148]) + 256 + sum(header[start + 156 :])
            if not any(148 <= position < 156 for position, _ in self.changes):
                header[start + 148 : start + 156] = b"%06o\0 " % checksum
        if self.only_extension:
            return bytes(header[:start])
        padded = (self.size + 511) // 512 * 512
        # Payloads that look like headers must not be taken for some.
        return bytes(header) + (bytes(header[start:]) * (padded // 512 + 1))[:padded]


name_texts = st.text(st.sampled_from("ab.c/_é\udce9"), min_size=1, max_size=30)
names = st.one_of(
    name_texts, name_texts.map(lambda text: text * 6), st.sampled_from(["__m__/a.txt", "x" * 99, "y" * 100])
)
kinds = st.sampled_from([b"0", b"0", b"0", b"0", b"\0", b"7", b"5", b"2", b"1"])
pax = st.sampled_from(
    [(), (), (("comment", "c"),), (("path", "p/q.txt"),), (("size", "10"),), (("mtime", "1.5"), ("atime", "2.5"))]
)
changes = st.sampled_from(
    [
        (),
        (),
        (),
        ((124, b"0000000012 \0"),),  # other ways to write a size of ten
        ((124, b"        12 \0"),),
        ((124, b"000000000012"),),
        ((124, b"\x80" + bytes(10) + b"\x0a"),),
        ((257, b"\0" * 88),),  # a tar of version 7
        ((345, b"prefix"),),
        ((124, b"-0000007777\0"),),
        ((20, b"behind/the.name"),),
        ((124, b"0000_000012\0"),),
        ((148, b"777777\0 "),),
    ]
)
entries = st.builds(
    Entry,
    name=names,
    size=st.sampled_from([0, 10, 10, 10, 512, 700, 70_000]),
    kind=kinds,
    tar_format=st.sampled_from(FORMATS),
    pax=pax,
    mtime=st.sampled_from([0, 1.25]),
    changes=changes,
    only_extension=st.sampled_from([False, False, False, True]),
).filter(lambda entry: len(entry.name.encode("utf-8", "surrogateescape")) <= 100 or entry.tar_format != FORMATS[0])
ends = st.sampled_from(
    [bytes(1024), bytes(1024), bytes(10240), b"", b"\0" * 300, b"\x11" * 512, bytes(512) + b"x" * 2048]
)


END = bytes(1024)
TIMED = Entry(mtime=1.25, tar_format=tarfile.PAX_FORMAT)


def outcome(path: Path, fast: bool) -> tuple[list[Member] | None, int, list[str], str]:
    with open(path, "rb") as file:
        headers = TarHeaders(file.fileno(), os.path.getsize(path), str(path))
        try:
            if fast:
                members = []
                for columns in headers.columns():
                    assert not columns.names[np.arange(columns.names.shape[1]) >= columns.lengths[:, None]].any()
                    members += columns.members()
            else:
                members = list(headers)
        except ShardFormatError as error:
            return None, 0, [], str(error)
        return members, headers.end, headers.notes, ""


@given(
    st.lists(st.one_of(entries, st.just(Entry())), max_size=12),
    ends,
    st.integers(0, 3000),
    st.sampled_from([1, 3, 2048]),
    st.sampled_from([4096, 1 << 16]),
)
@example([TIMED] * 30, END, 0, 2048, 4096)
@example([Entry("b.txt"), Entry("z" * 150, tar_format=tarfile.GNU_FORMAT)] * 30, END, 0, 2048, 4096)
@example([Entry(), Entry(tar_format=tarfile.PAX_FORMAT, pax=(("path", "p.txt"),)), Entry()], END, 0, 2048, 4096)
@example([TIMED, replace(TIMED, only_extension=True), TIMED], END, 0, 2048, 4096)
@example([Entry(), replace(TIMED, changes=((0, b"x" * 100),)), Entry()], END, 0, 2048, 4096)
@example([Entry()] * 3 + [Entry(size=0), Entry(tar_format=tarfile.PAX_FORMAT, pax=(("path", "p"),))], END, 0, 9, 4096)
@example([Entry(), replace(TIMED, changes=((124, b"\x80" + bytes(10) + b"\x0a"),))], END, 0, 2048, 4096)
@example([Entry(changes=((20, b"behind/the.name"),))], END, 0, 2048, 4096)
@example([Entry(), Entry(changes=((124, b"-0000007777\0"),))], END, 0, 2048, 4096)
def test_fast_is_slow(tmp_path: Path, written: list[Entry], end: bytes, cut: int, run: int, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tar_members, "_RUN", run)
        patch.setattr(tar_members, "_FIRST_CHUNK", chunk)
        patch.setattr(tar_headers, "_ONE_BY_ONE", 4)
        data = b"".join(entry.blocks() for entry in written) + end
        for stop in (len(data), len(data) - cut):
            (tmp_path / "a.tar").write_bytes(data[: max(0, stop)])
            assert outcome(tmp_path / "a.tar", fast=True) == outcome(tmp_path / "a.tar", fast=False)


@pytest.mark.parametrize("entry", [Entry(), TIMED])
def test_any_changed_byte_in_a_header_is_noticed(tmp_path: Path, entry: Entry) -> None:
    data, start = bytearray(entry.blocks() * 3 + END), len(entry.blocks())
    for position in range(start, start + 512):
        for change in (0x01, 0x31, 0x80):  # 0x31 makes a digit of a zero
            data[position] ^= change
            (tmp_path / "a.tar").write_bytes(data)
            assert outcome(tmp_path / "a.tar", fast=True) == outcome(tmp_path / "a.tar", fast=False)
            data[position] ^= change


def test_a_checksum_of_digits_that_are_not_octal(tmp_path: Path) -> None:
    number = next(n for n in range(99) if Entry(f"{n:02d}.a").blocks()[153:154] == b"0")
    data = bytearray(Entry(f"{number:02d}.a").blocks() + END)
    data[152:154] = bytes([data[152] - 1, ord("8")])  # of the same value, if eights counted
    (tmp_path / "a.tar").write_bytes(data)
    assert (
        "checksum" in outcome(tmp_path / "a.tar", fast=True)[3] or "not a tar" in outcome(tmp_path / "a.tar", True)[3]
    )


@pytest.mark.parametrize("tar_format", FORMATS)
def test_usual_shards_are_one_run(tmp_path: Path, tar_format: int) -> None:
    """Also those with fractions of seconds, which ``webdataset.TarWriter`` writes into a pax header of each member."""
    path = tmp_path / "a.tar"
    entries = [Entry(f"{number:06d}.txt", number, tar_format=tar_format, mtime=1.25) for number in range(500)]
    path.write_bytes(b"".join(entry.blocks() for entry in entries) + bytes(1024))
    with open(path, "rb") as file:
        found, position = PlainHeaders(file.fileno(), path.stat().st_size).run(0)
    assert found is not None and len(found) == 500 and position == path.stat().st_size - 1024
    assert found.sizes.tolist() == list(range(500))
    assert found.headers.tolist() == [0, *np.cumsum([len(entry.blocks()) for entry in entries])[:-1].tolist()]
    assert [found.name(row) for row in (0, 499)] == ["000000.txt", "000499.txt"]


def test_small_members_are_read_in_large_chunks_and_large_ones_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = calls_here(monkeypatch, os, "preadv")
    for size, calls, share in ((600, 12, 1.5), (200_000, 110, 0.03)):
        path = tmp_path / "a.tar"
        path.write_bytes(
            b"".join(Entry(f"{i}.bin", size).blocks() for i in range(100 if size > 1000 else 4000)) + bytes(1024)
        )
        reads.clear()
        members, *_ = outcome(path, fast=True)
        asked = [sum(map(len, buffers)) for _, buffers, _ in reads]
        assert members is not None and len(members) in (100, 4000)
        assert len(asked) <= calls and sum(asked) < share * path.stat().st_size + 70_000


def test_a_tar_of_another_program(tmp_path: Path) -> None:
    """GNU tar writes uid, times and sizes its own way."""
    import shutil
    import subprocess

    if shutil.which("tar") is None:
        pytest.skip("no tar")
    for number in range(50):
        (tmp_path / f"{number:02d}.txt").write_bytes(b"x" * number)
    for options in (["--format=gnu"], ["--format=pax"], ["--format=ustar"], ["--format=v7"], ["--format=oldgnu"]):
        files = sorted(path.name for path in tmp_path.glob("*.txt"))
        subprocess.run(["tar", *options, "-cf", "a.tar", *files], cwd=tmp_path, check=True, capture_output=True)
        fast = outcome(tmp_path / "a.tar", fast=True)
        assert fast == outcome(tmp_path / "a.tar", fast=False)
        assert fast[0] is not None and [(m.name, m.size) for m in fast[0]] == [(f"{n:02d}.txt", n) for n in range(50)]
