from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from energon_lite.errors import (
    ConfigError,
    EmptyDatasetError,
    MissingShardError,
    NotPreparedError,
    ShardChangedError,
    ShardFormatError,
    UsageError,
)
from energon_lite.storage import dataset_scan
from energon_lite.storage.dataset_scan import find_shards, odd_sample_notes, usual_parts
from energon_lite.storage.index.nv_meta import read_info
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.prepare import index_again, prepare_dataset
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.tar_scan import scan_shard
from tests.prepare_by_command import document, written
from tests.testing import Parts, write_members, write_tar

TEXT = {"sample_type": "TextSample", "field_map": {"text": "txt"}}


def test_writes_everything(ten: Path) -> None:
    report = prepare_dataset(ten, split_ratio="1,1,1", **TEXT)
    assert (report.shards, report.samples, report.parts) == (3, 10, {"txt": 10, "cls": 10})
    assert report.splits == {"train": (1, 4), "val": (1, 3), "test": (1, 3)} and report.warnings == ()
    names = {".info.json", "split.yaml", "dataset.yaml", "index.uuid", "index.sqlite", "energon_lite.idx"}
    assert written(ten) == names == {os.path.basename(path) for path in report.written}
    assert read_info(str(ten)) == {"a.tar": 4, "b.tar": 3, "sub/c.tar": 3}
    assert document(ten, "split.yaml") == {
        "split_parts": {"train": ["a.tar"], "val": ["b.tar"], "test": ["sub/c.tar"]},
        "exclude": [],
    }
    assert document(ten) == {
        "sample_type": {"__module__": "megatron.energon", "__class__": "TextSample"},
        "field_map": {"text": "txt"},
    }
    assert {path.name for path in ten.rglob("*.tar.idx")} == {"a.tar.idx", "b.tar.idx", "c.tar.idx"}
    assert not (ten / ".nv-meta/energon_lite.shards").exists()


def test_a_broken_shard_is_reported_with_its_path_and_an_earlier_preparation_stays(ten: Path) -> None:
    prepare_dataset(ten, split_ratio="1,0,0", **TEXT)
    os.truncate(ten / "b.tar", 2500)
    with pytest.raises(ShardFormatError, match=r"truncated[\s\S]*header at byte 2048[\s\S]*ten/b.tar"):
        prepare_dataset(ten, split_ratio="1,0,0", force_overwrite=True, **TEXT)
    assert len(WebdatasetSource.open(ten, shards=["a.tar"])) == 4


@pytest.mark.parametrize("again", [False, True])
def test_a_folder_that_cannot_be_written(ten: Path, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if again:
        prepare_dataset(ten, split_ratio="1,0,0")
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(ten)))
    before = sorted(ten.rglob("*"))
    with pytest.raises(UsageError, match=r"cannot be written[\s\S]*a user who may write there, or prepare a copy"):
        index_again(str(ten)) if again else prepare_dataset(ten, split_ratio="1,0,0")
    assert sorted(ten.rglob("*")) == before


def test_no_tars_or_only_compressed_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EmptyDatasetError, match=r"no \.tar files"):
        prepare_dataset(tmp_path, split_ratio="1,0,0")
    (tmp_path / "a.tar.gz").write_bytes(b"")
    with pytest.raises(ShardFormatError, match=r"all shards are compressed, such as 'a.tar.gz'"):
        prepare_dataset(tmp_path, split_ratio="1,0,0")
    for name in ("b.tar", "b.tar.gz", "c.tgz"):
        (tmp_path / name).write_bytes(b"")
    assert find_shards(str(tmp_path), "c") == ["b.tar"]
    assert "compressed shards are left out (unpack them to .tar), such as a.tar.gz" in caplog.text
    caplog.clear()
    assert find_shards(str(tmp_path), "^[ac]") == ["b.tar"] and not caplog.text  # b is there, the others are named


def test_all_excluded(ten: Path) -> None:
    with pytest.raises(EmptyDatasetError, match=r"--exclude leaves in \(3 were found\)"):
        prepare_dataset(ten, split_ratio="1,0,0", exclude=".")


def test_a_brace_in_a_name(ten: Path) -> None:
    (ten / "a.tar").rename(ten / "a{1}.tar")
    with pytest.raises(UsageError, match="brace in its name"):
        prepare_dataset(ten, split_ratio="1,0,0")


def test_no_samples(tmp_path: Path) -> None:
    write_members(tmp_path / "d/a.tar", [("README", b"")])
    with pytest.raises(EmptyDatasetError, match="none of the 1 shard holds a sample"):
        prepare_dataset(tmp_path / "d", split_ratio="1,0,0")


@pytest.mark.parametrize("options", [{}, {"split_ratio": "1,0,0", "split_parts": {"train": ".*"}}])
def test_either_ratio_or_patterns(ten: Path, options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="either split_ratio or split_parts"):
        prepare_dataset(ten, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sample_type", "field_map", "message"),
    [
        ("TextSampel", {"text": "txt"}, r"'TextSampel' is unknown[\s\S]*did you mean 'TextSample'"),
        ("TextSample", {"txet": "txt"}, r"no field 'txet'[\s\S]*did you mean 'text'"),
        ("TextSample", {}, r"TextSample needs 'text'; found only nothing"),
        ("TextSample", {"text": "tx"}, r"no sample has a part 'tx'[\s\S]*did you mean 'txt'"),
        ("TextSample", {"text": "txt["}, r"not a field access[\s\S]*field_map.text"),
        ("TextSample", {"text": "txt[0]"}, r"fits none of the tried samples[\s\S]*txt is of type str"),
        ("TextSample", None, r"needs a field map[\s\S]*\{\"text\": \"...\"\}' with parts out of: txt, cls"),
        (None, {"text": "txt"}, "a field map needs a sample type"),
        ("CrudeWebdataset", {"text": "txt"}, "neither a sample type nor a field map"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    ten: Path, sample_type: str | None, field_map: dict[str, str] | None, message: str
) -> None:
    with pytest.raises((ConfigError, UsageError), match=message):
        prepare_dataset(ten, split_ratio="1,0,0", sample_type=sample_type, field_map=field_map)
    assert written(ten) == set()


def test_broken_samples_do_not_speak_against_a_map(tmp_path: Path) -> None:
    write_members(tmp_path / "d/a.tar", [("0.json", b"{"), ("1.json", b'{"t": 1}')])
    prepare_dataset(tmp_path / "d", split_ratio="1,0,0", sample_type="TextSample", field_map={"text": "json[t]"})


def test_parts_that_do_not_stand_together(tmp_path: Path) -> None:
    write_members(tmp_path / "d/a.tar", [("0.jpg", b""), ("1.jpg", b""), ("0.txt", b""), ("1.txt", b"")])
    report = prepare_dataset(tmp_path / "d", split_ratio="1,0,0")
    assert report.samples == 4 and "a.tar (its parts are not contiguous?)" in report.warnings[-1]


def test_shards_without_samples_are_left_out(ten: Path) -> None:
    write_members(ten / "empty.tar", [])
    report = prepare_dataset(ten, split_ratio="1,0,0")
    assert report.shards == 3 and "empty.tar" not in read_info(str(ten))
    assert report.warnings[0] == "empty.tar: holds no sample, it is left out"


def test_keys_with_dots(tmp_path: Path) -> None:
    write_members(tmp_path / "d/a.tar", [(f"frame.{number}.jpg", b"") for number in range(150)])
    report = prepare_dataset(tmp_path / "d", split_ratio="1,0,0")
    assert report.samples == 1 and "150 part names, such as '0.jpg'" in report.warnings[0]


def test_splits_without_shards(ten: Path) -> None:
    report = prepare_dataset(ten, split_ratio="8,1,1")
    assert report.splits == {"train": (2, 7), "val": (0, 0), "test": (1, 3)}
    assert "split 'val' got no shard" in report.warnings[0]


def test_exclusions_made_by_hand_are_kept(ten: Path) -> None:
    prepare_dataset(ten, split_ratio="1,0,0")
    (ten / ".nv-meta/split.yaml").write_text("split_parts: {train: [a.tar]}\nexclude: [a.tar/0]\n")
    report = prepare_dataset(ten, split_ratio="1,0,0", force_overwrite=True)
    assert document(ten, "split.yaml")["exclude"] == ["a.tar/0"]
    assert "kept 1 exclusion of" in report.warnings[-1]


def test_shards_are_found_everywhere_but_in_hidden_folders(ten: Path) -> None:
    (ten / ".cache").mkdir()
    (ten / "a.tar").rename(ten / ".cache/a.tar")
    (ten / "notes.txt").write_text("")
    write_members(ten / "x.tar/d.tar", [("x.txt", b"x")])  # in a folder with the name of a shard
    assert find_shards(str(ten)) == ["b.tar", "sub/c.tar", "x.tar/d.tar"]


# What lies about in a folder, or is put there by somebody who means harm.


@pytest.mark.parametrize("target", [".", "sub", "..", "sub/../sub", "missing"])
def test_links_to_folders_of_its_own(ten: Path, caplog: pytest.LogCaptureFixture, target: str) -> None:
    """Each folder is searched once, by its own name; a link in a circle would give its shards for ever."""
    for place in ("again", "sub/again"):
        (ten / place).symlink_to(target, target_is_directory=True)
    assert find_shards(str(ten)) == ["a.tar", "b.tar", "sub/c.tar"]
    assert target == "missing" or "leads to a folder that is searched already" in caplog.text


def test_links_to_folders_elsewhere(tmp_path: Path, ten: Path) -> None:
    write_members(tmp_path / "disk/deep/d.tar", [("x.txt", b"x")])
    write_members(ten / ".store/e.tar", [("y.txt", b"y")])
    (ten.parent / "disk/deep/back").symlink_to(ten.parent, target_is_directory=True)
    (ten / "disk").symlink_to(ten.parent / "disk", target_is_directory=True)
    (ten / "twice").symlink_to(ten.parent / "disk" / "deep", target_is_directory=True)
    (ten / "store").symlink_to(".store", target_is_directory=True)
    (ten / "l.tar").symlink_to(".store/e.tar")  # and to a shard
    found = find_shards(str(ten))
    assert found == ["a.tar", "b.tar", "disk/deep/d.tar", "l.tar", "store/e.tar", "sub/c.tar"]
    assert prepare_dataset(ten, split_ratio="1,0,0").samples == 13


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("make", [os.mkfifo, make_socket, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file(ten: Path, make: Callable[[Path], None]) -> None:
    """Opening a pipe waits for somebody who writes into it."""
    make(ten / "x.tar")
    for run in (partial(prepare_dataset, ten, split_ratio="1,0,0"), partial(find_shards, str(ten))):
        with pytest.raises(ShardFormatError, match=r"not a file[\s\S]*x\.tar[\s\S]*--exclude"):
            run()
    with pytest.raises(ShardFormatError, match="not a file"):
        scan_shard(str(ten), "x.tar")
    assert prepare_dataset(ten, split_ratio="1,0,0", exclude="x").shards == 3


@pytest.mark.parametrize(
    "name", [".info.json", ".info.yaml", "index.uuid", "split.yaml", "index.sqlite", "../a.tar.idx"]
)
@pytest.mark.parametrize("kind", [os.mkfifo, os.mkdir])
def test_descriptions_that_are_no_files(ten: Path, name: str, kind: Callable[[Path], None]) -> None:
    """Nothing waits for a pipe to be written to; what is no file counts as missing."""
    prepare_dataset(ten, split_ratio="1,0,0")
    path = ten / ".nv-meta" / name
    path.unlink(missing_ok=True)
    kind(path)
    if name == ".info.json":
        with pytest.raises(NotPreparedError):
            read_info(str(ten))
    else:
        assert len(WebdatasetSource.open(ten)) == 10
    if kind is os.mkfifo:
        assert prepare_dataset(ten, split_ratio="1,0,0", force_overwrite=True).samples == 10


@pytest.mark.parametrize(
    "text", [b"\xff", b"[" * 100_000, b"exclude: {a: 1}", b"exclude: [[a], {b: c}, a.tar]", b"- a"]
)
def test_an_earlier_list_of_splits_that_cannot_be_read(ten: Path, text: bytes) -> None:
    (ten / ".nv-meta").mkdir()
    (ten / ".nv-meta/split.yaml").write_bytes(text)
    report = prepare_dataset(ten, split_ratio="1,0,0")
    assert report.samples == 10
    assert document(ten, "split.yaml")["exclude"] == (["a.tar"] if b"a.tar" in text else [])
    assert any("earlier preparation cannot be read, and are gone" in warning for warning in report.warnings)


def test_index_again(ten: Path) -> None:
    prepare_dataset(ten, split_ratio="1,1,1", **TEXT)
    kept = {name: (ten / ".nv-meta" / name).read_bytes() for name in (".info.json", "split.yaml", "dataset.yaml")}
    write_members(ten / "b.tar", [("x.txt", b"x" * 20_000), ("y.txt", b""), ("z.txt", b"")])
    with pytest.raises(ShardChangedError, match=r"b\.tar[\s\S]*energon-lite prepare"):
        WebdatasetSource.open(ten)
    index_again(str(ten))
    source = WebdatasetSource.open(ten)
    assert [source.key(i) for i in range(10)] == list("0123xyz789")
    assert kept == {name: (ten / ".nv-meta" / name).read_bytes() for name in kept}
    write_members(ten / "b.tar", [("x.txt", b"")])
    with pytest.raises(ShardChangedError, match=r"has 1 sample, but 3[\s\S]*--force-overwrite"):
        index_again(str(ten))
    write_members(ten / "b.tar", [])
    with pytest.raises(ShardChangedError, match="has 0 samples, but 3"):
        index_again(str(ten))
    (ten / "b.tar").unlink()
    with pytest.raises(MissingShardError, match=r"b\.tar[\s\S]*put it back"):
        index_again(str(ten))
    info = ten / ".nv-meta/.info.json"
    info.write_text(info.read_text().replace('"b.tar": 3', '"b.tar": 0'))  # nobody misses a shard without samples
    assert index_again(str(ten)).samples == 7


# -- samples that are unlike the others


def notes(path: Path, odd: dict[int, Parts], count: int = 100) -> list[str]:
    """What is said of two shards of samples with a text and a label, but for some."""
    samples = [(f"{number:03d}", odd.get(number, {"txt": b"x", "cls": b"1"})) for number in range(count)]
    for name, some in (("a.tar", samples[: count // 2]), ("b.tar", samples[count // 2 :])):
        write_tar(path / name, some)
    return [*odd_sample_notes(PackedIndex.from_scans([scan_shard(str(path), name) for name in ("a.tar", "b.tar")]))]


@pytest.mark.parametrize("block", [1 << 20, 7])
def test_odd_samples_are_told(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_scan, "_BLOCK", block)
    odd: dict[int, Parts] = {3: {"txt": b"", "cls": b"1"}, 60: {"txt": b"x"}, 99: {"txt": b"", "cls": b""}}
    assert sorted(notes(tmp_path, odd)) == [
        "1 sample has no part 'cls', which nearly all others have: b.tar: 060.cls",
        "3 samples have a part without bytes: a.tar: 003.txt, b.tar: 099.txt, b.tar: 099.cls",
    ]


def test_a_part_in_the_place_of_another(tmp_path: Path) -> None:
    assert notes(tmp_path, {5: {"txt": b"x", "json": b"1"}}) == []


def test_a_part_that_many_have_not_is_no_loss(tmp_path: Path) -> None:
    assert notes(tmp_path, {number: {"txt": b"x"} for number in range(5)}) == []


@pytest.mark.parametrize("part", ["txt", "cls"])
def test_a_part_twice(tmp_path: Path, part: str) -> None:
    write_tar(tmp_path / "a.tar", [("0", {"txt": b"1", "cls": b"1"}), ("0", {part: b"2"})])
    index = PackedIndex.from_scans([scan_shard(str(tmp_path), "a.tar")])
    assert [*odd_sample_notes(index)] == [f"1 sample has a part more than once: a.tar: 0.{part}"]


def test_usual_parts() -> None:
    numbers = np.array([0] * 100 + [1] * 98 + [2] * 97)
    assert usual_parts(numbers, ["a", "b", "c"], 100) == {"a", "b"}
    assert [*odd_sample_notes(PackedIndex.from_scans([]))] == []
