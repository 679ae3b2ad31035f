"""The members of tars are those that ``tarfile`` finds, and damage is an error. What is parsed as arrays is, in every
field, note and error, what is parsed header by header."""

from __future__ import annotations

import gzip
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

    def fits(self) -> bool:
        return len(self.name.encode("utf-8", "surrogateescape")) <= 100 or self.tar_format != tarfile.USTAR_FORMAT

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
any_texts = st.text(
    alphabet=st.characters(codec="utf-8", exclude_characters="\0\n/", exclude_categories=["Cs"]),
    min_size=1,
    max_size=40,
)
paths = st.lists(any_texts, min_size=1, max_size=8).map("/".join)
kinds = st.sampled_from([b"0", b"0", b"0", b"0", b"\0", b"7", b"5", b"2", b"1"])
usual_pax: list[tuple[tuple[str, str], ...]] = [
    *((), (), (("comment", "c"),), (("path", "p/q.txt"),), (("mtime", "1.5"), ("atime", "2.5")))
]
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
formats = st.sampled_from([*FORMATS.values()])
entries = st.builds(
    Entry,
    name=names,
    size=st.sampled_from([0, 10, 10, 10, 512, 700, 70_000]),
    kind=kinds,
    tar_format=formats,
    pax=st.sampled_from([*usual_pax, (("size", "10"),)]),
    mtime=st.sampled_from([0, 1.25]),
    changes=changes,
    only_extension=st.sampled_from([False, False, False, True]),
).filter(Entry.fits)
#: Those that are as ``tarfile`` writes them.
usual_entries = st.builds(
    lambda size, kind, **more: Entry(size=size if kind in (b"0", b"\0", b"7") else 0, kind=kind, **more),
    name=names | paths,
    size=st.integers(0, 2000) | st.just(70_000),
    kind=kinds,
    tar_format=formats,
    pax=st.sampled_from(usual_pax),
).filter(Entry.fits)
ends = st.sampled_from(
    [bytes(1024), bytes(1024), bytes(10240), b"", b"\0" * 300, b"\x11" * 512, bytes(512) + b"x" * 2048]
)


#: A name that each format stores in another way.
LONG = [Entry("d" * 90 + "/" + "f" * 90, tar_format=tar_format) for tar_format in FORMATS.values()]


def write(path: Path, *entries: Entry, end: bytes = END) -> Path:
    path.write_bytes(b"".join(entry.blocks() for entry in entries) + end)
    return path


@given(st.lists(usual_entries, max_size=8))
@example([Entry("folder", 0, b"5"), *LONG, Entry("link", 0, b"2"), Entry("last")])
@example([Entry(name, 0, changes=((124, bytes(12)),)) for name in ("a.txt", "b.txt")])  # a size without digits is 0
@example([Entry("a.bin", 600, tar_format=tarfile.PAX_FORMAT, pax=(("size", "600"),), changes=((124, b"0" * 11),))])
@example([])
def test_finds_what_tarfile_finds(tmp_path: Path, written: list[Entry]) -> None:
    path = write(tmp_path / "a.tar", *written)
    found, state = headers(path)
    assert found == columns(path)[0] == reference(path)
    assert (state.end, state.notes) == (path.stat().st_size - 1024, [])


def three(tmp_path: Path) -> Path:
    return write(tmp_path / "a.tar", *(Entry(f"{number}.txt", 600) for number in range(3)))


@pytest.mark.parametrize("keep", [1, 511, 512, 1024, 1535, 1600, 4096])
def test_a_truncated_file_is_reported_with_its_byte(tmp_path: Path, keep: int) -> None:
    path = three(tmp_path)
    os.truncate(path, keep)
    with pytest.raises(ShardFormatError, match=rf"truncated: its {keep} bytes[\s\S]*{path}[\s\S]*prepare again"):
        headers(path)


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
        (gzip.compress(b"x" * 2000, mtime=0).ljust(1024), "compressed .gzip."),
        (b"\x28\xb5\x2f\xfd" + b"x" * 2000, "compressed .zstd."),
        (b"<html>not found</html>" * 100, "not a tar file"),
        (Entry(kind=tarfile.GNUTYPE_SPARSE, size=0).blocks() + END, "stored sparsely"),
        # The size is understood, although the file is too short for it.
        (Entry(changes=((124, b"\x80" + (9 << 30).to_bytes(11, "big")),)).blocks(), str(512 + (9 << 30))),
    ],
    ids=["empty", "gzip", "zstd", "HTML", "sparse", "above 8 GiB"],
)
def test_what_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(ShardFormatError, match=message):
        headers(tmp_path / "a.tar")


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
        more = len(content) - len(behind)
        said = rf"zeros at byte {end} end it.*byte {more} [\s\S]*{path}[\s\S]*truncate -s {end + 512}"
        with pytest.raises(ShardFormatError, match=said):
            read(path)
        os.truncate(path, end + 512)
        assert len(read(path)[0]) == hole
        path.write_bytes(content)


def test_payloads_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.tar", *(Entry(f"{number}.bin", 3 << 20) for number in range(10)))
    reads = calls_here(monkeypatch, os, "pread")
    assert len(headers(path)[0]) == 10
    assert sum(min(size, path.stat().st_size - offset) for _, size, offset in reads) < 300_000


# -- many headers at once


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
    data = bytearray(Entry(f"{number:02d}.a").blocks())
    data[152:154] = bytes([data[152] - 1, ord("8")])  # of the same value, if eights counted
    error = outcome(write(tmp_path / "a.tar", end=bytes(data) + END), fast=True)[3]
    assert "checksum" in error or "not a tar" in error


@pytest.mark.parametrize("tar_format", FORMATS.values(), ids=FORMATS)
def test_usual_shards_are_one_run(tmp_path: Path, tar_format: int) -> None:
    """Also those with fractions of seconds, which ``webdataset.TarWriter`` writes into a pax header of each member."""
    entries = [Entry(f"{number:06d}.txt", number, tar_format=tar_format, mtime=1.25) for number in range(500)]
    path = write(tmp_path / "a.tar", *entries)
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
    for count, size, calls, share in ((4000, 600, 12, 1.5), (100, 200_000, 110, 0.03)):
        path = write(tmp_path / "a.tar", *(Entry(f"{number}.bin", size) for number in range(count)))
        reads.clear()
        members, *_ = outcome(path, fast=True)
        asked = [sum(map(len, buffers)) for _, buffers, _ in reads]
        assert members is not None and len(members) == count
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
