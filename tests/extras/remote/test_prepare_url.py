"""Preparing a data set behind a URL gives what preparing a local copy gives, and reading it needs nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from energon_lite.errors import ShardFormatError, UsageError
from energon_lite.extras.remote import prepare_url
from energon_lite.extras.remote.remote_files import list_files
from energon_lite.storage.prepare import index_again, prepare_dataset
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.accidents import interrupted
from tests.servers import upload
from tests.testing import contents_of, output_of

URL = "memory://bucket/ten"
OPTIONS: dict[str, Any] = {"split_ratio": "2,1,0", "sample_type": "TextSample", "field_map": {"text": "txt"}}


@pytest.fixture(autouse=True)
def _uploaded(ten: Path, memory: Any) -> None:
    upload(ten, "bucket/ten")


def contents(fs: Any) -> dict[str, bytes]:
    return {name.removeprefix("/bucket/ten/"): fs.cat_file(name) for name in fs.find("/bucket/ten")}


def test_all_files_are_those_of_a_local_folder(memory: Any, ten: Path, tmp_path: Path) -> None:
    report = prepare_dataset(URL, **OPTIONS)
    local = prepare_dataset(ten, **OPTIONS)
    assert (report.path, report.samples, report.splits) == (URL, 10, local.splits)
    here, there = contents_of(ten), contents(memory)
    assert there.keys() == here.keys()
    differ = {name for name in here if here[name] != there[name]}
    assert differ <= {".nv-meta/energon_lite.idx"}  # it has times in it, which stores do not say
    source = WebdatasetSource.open(URL)
    assert source.index.digest == WebdatasetSource.open(ten).index.digest
    assert SampleReader(source).sample(9).parts == {"txt": b"text 9", "cls": b"9"}
    assert not [path for path in (tmp_path / "cache/prepare").rglob("*") if path.is_file()]


def test_a_prepared_one_is_left_alone(memory: Any) -> None:
    prepare_dataset(URL, **OPTIONS)
    before = contents(memory)
    with pytest.raises(UsageError, match=r"already been prepared[\s\S]*--force-overwrite"):
        prepare_dataset(URL, **OPTIONS)
    assert contents(memory) == before
    memory.rm_file("/bucket/ten/b.tar")
    assert prepare_dataset(URL, force_overwrite=True, **OPTIONS).samples == 7
    assert len(WebdatasetSource.open(URL)) == 7


def test_indexes_are_made_again(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_dataset(URL, **OPTIONS)
    before = contents(memory)
    for name in ("energon_lite.idx", "index.sqlite", "index.uuid"):
        memory.rm_file(f"/bucket/ten/.nv-meta/{name}")
    memory.rm_file("/bucket/ten/a.tar.idx")
    index_again(URL)
    assert contents(memory) == before


@pytest.mark.parametrize(
    ("step", "at", "left"),
    [("scan_remote_shard", "sub/c.tar", ["sub/c.tar"]), ("put_file", ".nv-meta/.info.json", [])],
    ids=["scan", "publish"],
)
def test_one_that_ended_half_way_goes_on(memory: Any, step: str, at: str, left: list[str]) -> None:
    with interrupted(prepare_url, step, lambda _, name, *__: name.endswith(at)), pytest.raises(KeyboardInterrupt):
        prepare_dataset(URL, **OPTIONS)
    assert ".nv-meta/.info.json" not in contents(memory)
    with interrupted(prepare_url, "scan_remote_shard") as scanned:
        assert prepare_dataset(URL, **OPTIONS).samples == 10
    assert [name for _, name, _ in scanned] == left
    assert ".nv-meta/energon_lite.unfinished" not in contents(memory) and len(WebdatasetSource.open(URL)) == 10


def test_broken_shards_are_named(memory: Any) -> None:
    memory.pipe_file("/bucket/ten/b.tar", b"x" * 1024)
    memory.pipe_file("/bucket/ten/d.tar", b"")
    with pytest.raises(ShardFormatError, match=r"2 of 4 shards[\s\S]*b\.tar: [\s\S]*d\.tar: "):
        prepare_dataset(URL, **OPTIONS)
    assert not list_files(URL, ".nv-meta")
    assert prepare_dataset(URL, exclude="^[bd][.]", **OPTIONS).samples == 7


def test_what_cannot_be_written_to(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_url, "list_files", lambda *_: {"a.tar": {"size": 10240}})
    with pytest.raises(UsageError, match=r"https:// cannot be written to[\s\S]*upload"):
        prepare_dataset("https://example.org/ten", **OPTIONS)
    monkeypatch.undo()

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise PermissionError("AccessDenied")

    monkeypatch.setattr(type(memory), "pipe_file", refuse)
    with pytest.raises(UsageError, match="refuses the request: PermissionError: AccessDenied"):
        prepare_dataset(URL, **OPTIONS)


def test_on_the_command_line(memory: Any, tmp_path: Path) -> None:
    words = ["prepare", URL, "--non-interactive", "--split-ratio", "2,1,0", "--tmp-path", str(tmp_path / "tmp")]
    words += ["--sample-type", "TextSample", "--field-map", '{"text": "txt"}', "--no-progress"]
    assert URL in output_of(*words) and not list((tmp_path / "tmp").rglob("*.json"))
    assert len(WebdatasetSource.open(URL)) == 10
    output_of("prepare", URL, "--tar-index-only", "--no-progress")
