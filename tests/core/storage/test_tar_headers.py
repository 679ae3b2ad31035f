"""The members of tars are those that ``tarfile`` finds, and damage is an error. What is parsed as arrays is, in every
field, note and error, what is parsed header by header."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
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

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
END = bytes(1024)


def headers(path: Path) -> tuple[list[Member], TarHeaders]:
    with open(path, "rb") as file:
        found = TarHeaders(file.fileno(), os.path.getsize(path), str(path))
        return list(found), found


def columns(path: Path) -> tuple[list[Member], TarHeaders]:
    with open(path, "rb") as file:
        found = TarHeaders(file.fileno(), os.path.getsize(path), str(path))
        members = []
        for run in found.columns():
            assert not run.names[np.arange(run.names.shape[1]) >= run.lengths[:, None]].any()
            places = np.stack([run.headers, run.offsets, run.sizes], 1).tolist()
            members += [Member(header, run.name(row), *place) for row, (header, *place) in enumerate(places)]
        return members, found


def reference(path: Path) -> list[Member]:
    with tarfile.open(path) as tar:
        return [Member(m.offset, m.name, m.offset_data, m.size) for m in tar if m.isreg()]


def write(path: Path, members: list[tuple[str, int]], tar_format: int) -> None:
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, size in members:
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(b"x" * size))


parts = st.text(
    alphabet=st.characters(codec="utf-8", exclude_characters="\0\n/", exclude_categories=["Cs"]),
    min_size=1,
    max_size=40,
)
paths = st.lists(parts, min_size=1, max_size=8).map("/".join)
sizes = st.one_of(st.integers(0, 2000), st.just(70_000))


@given(st.lists(st.tuples(paths, sizes), max_size=8), st.sampled_from(["gnu", "pax"]))
def test_finds_what_tarfile_finds(tmp_path: Path, members: list[tuple[str, int]], tar_format: str) -> None:
    write(tmp_path / "a.tar", members, FORMATS[tar_format])
    assert headers(tmp_path / "a.tar")[0] == reference(tmp_path / "a.tar")


@pytest.mark.parametrize("tar_format", FORMATS)
def test_folders_links_and_names_with_a_prefix(tmp_path: Path, tar_format: str) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=FORMATS[tar_format]) as tar:
        for name, kind in [
            ("folder", tarfile.DIRTYPE),
            ("d" * 90 + "/" + "f" * 90, tarfile.REGTYPE),
            ("link", tarfile.SYMTYPE),
            ("last", tarfile.REGTYPE),
        ]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "last" if kind == tarfile.SYMTYPE else ""
            info.size = 3 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"abc"))
    found, state = headers(path)
    assert [m.name[-4:] for m in found] == ["ffff", "last"]
    assert found == reference(path)
    assert state.end == found[-1].offset + 512
    assert state.notes == []


def test_a_size_above_8_gib_is_read_from_the_base_256_field(tmp_path: Path) -> None:
    """Only the header exists; the size must be understood before the file is found to be too short for it."""
    info = tarfile.TarInfo("huge.bin")
    info.size = 9 << 30
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(ShardFormatError, match=str(512 + (9 << 30))):
        headers(tmp_path / "a.tar")


def test_a_pax_size_replaces_that_of_the_header(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.bin")
    info.size, info.pax_headers = 0, {"size": "600"}
    data = info.tobuf(tarfile.PAX_FORMAT) + b"y" * 1024 + bytes(1024)
    (tmp_path / "a.tar").write_bytes(data)
    found, _ = headers(tmp_path / "a.tar")
    assert [(m.name, m.size) for m in found] == [("a.bin", 600)] and found == reference(tmp_path / "a.tar")


def three(tmp_path: Path) -> Path:
    write(tmp_path / "a.tar", [("0.txt", 600), ("1.txt", 600), ("2.txt", 600)], tarfile.USTAR_FORMAT)
    return tmp_path / "a.tar"


@pytest.mark.parametrize("keep", [1, 511, 512, 1024, 1535, 1600, 4096])
def test_a_truncated_file_is_reported_with_its_byte(tmp_path: Path, keep: int) -> None:
    path = three(tmp_path)
    os.truncate(path, keep)
    with pytest.raises(ShardFormatError, match=rf"truncated: its {keep} bytes") as caught:
        headers(path)
    assert str(path) in str(caught.value) and "prepare again" in str(caught.value)


@pytest.mark.parametrize("keep", [1536, 3072, 4608])
def test_a_cut_between_members_cannot_be_told_from_a_missing_end_marker_but_is_noted(tmp_path: Path, keep: int) -> None:
    path = three(tmp_path)
    os.truncate(path, keep)
    found, state = headers(path)
    assert len(found) == keep // 1536
    assert "no end marker" in state.notes[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty file"),
        (gzip.compress(b"x" * 2000, mtime=0), "compressed .gzip."),
        (b"\x28\xb5\x2f\xfd" + b"x" * 2000, "compressed .zstd."),
        (b"<html>not found</html>" * 100, "not a tar file"),
    ],
)
def test_other_files(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.tar").write_bytes(data and data.ljust(1024, b"z"))
    with pytest.raises(ShardFormatError, match=message):
        headers(tmp_path / "a.tar")


def test_an_empty_archive_has_no_members(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [], tarfile.USTAR_FORMAT)
    found, state = headers(tmp_path / "a.tar")
    assert (found, state.end, state.notes) == ([], 0, [])


@given(st.integers(0, 3), st.booleans(), st.integers(0, 1 << 17), st.integers(0, 2))
def test_what_stands_behind_the_end_is_an_error_unless_it_is_zeros(
    tmp_path: Path, hole: int, joined: bool, zeros: int, data: int
) -> None:
    """A hole where a header was, tars joined with ``cat``, padding of any length: no sample is lost in silence."""
    path = three(tmp_path)
    whole = path.read_bytes()[: 3 * 1536 + 1024]
    members = whole[: 3 * 1536]
    if hole < 3:
        members = members[: 1536 * hole] + bytes(512) + members[1536 * hole + 512 :]
    content = members + bytes(1024) + (whole if joined else b"") + bytes(zeros) + b"x" * data
    path.write_bytes(content)
    end = 1536 * hole
    behind = content[end:].lstrip(b"\0")
    for read in (headers, columns):
        if not behind:
            assert [m.name for m in read(path)[0]] == ["0.txt", "1.txt", "2.txt"] and hole == 3
            continue
        with pytest.raises(
            ShardFormatError, match=rf"zeros at byte {end} end it.*byte {len(content) - len(behind)} "
        ) as caught:
            read(path)
        assert str(path) in str(caught.value) and f"truncate -s {end + 512}" in str(caught.value)
        os.truncate(path, end + 512)
        assert len(read(path)[0]) == hole
        path.write_bytes(content)


def test_sparse_members_are_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.bin")
    info.type = tarfile.GNUTYPE_SPARSE
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(ShardFormatError, match="stored sparsely"):
        headers(tmp_path / "a.tar")


def test_payloads_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.tar", [(f"{i}.bin", 3 << 20) for i in range(10)], tarfile.USTAR_FORMAT)
    reads = calls_here(monkeypatch, os, "pread")
    assert len(headers(tmp_path / "a.tar")[0]) == 10
    whole = (tmp_path / "a.tar").stat().st_size
    assert sum(min(size, whole - offset) for _, size, offset in reads) < 300_000


# -- many headers at once


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
    tar_format=st.sampled_from([*FORMATS.values()]),
    pax=pax,
    mtime=st.sampled_from([0, 1.25]),
    changes=changes,
    only_extension=st.sampled_from([False, False, False, True]),
).filter(
    lambda entry: len(entry.name.encode("utf-8", "surrogateescape")) <= 100 or entry.tar_format != tarfile.USTAR_FORMAT
)
ends = st.sampled_from(
    [bytes(1024), bytes(1024), bytes(10240), b"", b"\0" * 300, b"\x11" * 512, bytes(512) + b"x" * 2048]
)


TIMED = Entry(mtime=1.25, tar_format=tarfile.PAX_FORMAT)


def outcome(path: Path, fast: bool) -> tuple[list[Member] | None, int, list[str], str]:
    try:
        members, found = columns(path) if fast else headers(path)
    except ShardFormatError as error:
        return None, 0, [], str(error)
    return members, found.end, found.notes, ""


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
@example([Entry(), Entry(changes=((124, b"-0000001130\0"),))], END, 0, 2048, 4096)
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
            slow = outcome(tmp_path / "a.tar", fast=False)
            assert outcome(tmp_path / "a.tar", fast=True) == slow
            if slow[0] is None:
                assert f"byte {start}" in slow[3]
            else:  # a change of the stored checksum's padding says nothing else about the member
                assert 148 <= position - start < 156 and len(slow[0]) == 3
            data[position] ^= change


def test_a_checksum_of_digits_that_are_not_octal(tmp_path: Path) -> None:
    number = next(n for n in range(99) if Entry(f"{n:02d}.a").blocks()[153:154] == b"0")
    data = bytearray(Entry(f"{number:02d}.a").blocks() + END)
    data[152:154] = bytes([data[152] - 1, ord("8")])  # of the same value, if eights counted
    (tmp_path / "a.tar").write_bytes(data)
    error = outcome(tmp_path / "a.tar", fast=True)[3]
    assert "checksum" in error or "not a tar" in error


def test_a_size_without_digits_is_0(tmp_path: Path) -> None:
    empty = [Entry(name, 0, changes=((124, bytes(12)),)) for name in ("a.txt", "b.txt")]
    (tmp_path / "a.tar").write_bytes(b"".join(entry.blocks() for entry in empty) + END)
    assert headers(tmp_path / "a.tar")[0] == columns(tmp_path / "a.tar")[0] == reference(tmp_path / "a.tar")


@pytest.mark.parametrize("tar_format", FORMATS.values(), ids=FORMATS)
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
