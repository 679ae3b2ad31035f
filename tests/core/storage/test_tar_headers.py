from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import ShardFormatError
from energon_lite.storage.tar_headers import Member, TarHeaders

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def headers(path: Path) -> tuple[list[Member], TarHeaders]:
    with open(path, "rb") as file:
        found = TarHeaders(file.fileno(), os.path.getsize(path), str(path))
        return list(found), found


def columns(path: Path) -> tuple[list[Member], TarHeaders]:
    with open(path, "rb") as file:
        found = TarHeaders(file.fileno(), os.path.getsize(path), str(path))
        return [member for run in found.columns() for member in run.members()], found


def reference(path: Path) -> list[Member]:
    with tarfile.open(path) as tar:
        return [Member(m.offset, m.name, m.offset_data, m.size) for m in tar if m.isreg()]


def write(path: Path, members: list[tuple[str, int]], tar_format: int) -> None:
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, size in members:
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(b"x" * size))


names = st.text(
    alphabet=st.characters(codec="utf-8", exclude_characters="\0\n/", exclude_categories=["Cs"]),
    min_size=1,
    max_size=40,
)
paths = st.lists(names, min_size=1, max_size=8).map("/".join)
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


@given(st.integers(0, 511), st.integers(1, 255))
def test_any_changed_byte_in_a_header_is_noticed(tmp_path: Path, position: int, change: int) -> None:
    path = three(tmp_path)
    data = bytearray(path.read_bytes())
    data[1536 + position] ^= change
    path.write_bytes(data)
    try:
        found, _ = headers(path)
    except ShardFormatError as error:
        assert "byte 1536" in str(error)
    else:  # a change of the stored checksum's padding says nothing else about the member
        assert 148 <= position < 156 and [m.name for m in found] == ["0.txt", "1.txt", "2.txt"]


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
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(ShardFormatError, match=message):
        headers(tmp_path / "a.tar") if len(data) in (0,) or len(data) >= 512 else headers(padded(tmp_path / "a.tar"))


def padded(path: Path) -> Path:
    path.write_bytes(path.read_bytes().ljust(1024, b"z"))
    return path


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
    bytes_read = 0
    pread = os.pread

    def counting(fd: int, size: int, offset: int) -> bytes:
        nonlocal bytes_read
        data = pread(fd, size, offset)
        bytes_read += len(data)
        return data

    monkeypatch.setattr(os, "pread", counting)
    assert len(headers(tmp_path / "a.tar")[0]) == 10
    assert bytes_read < 300_000
