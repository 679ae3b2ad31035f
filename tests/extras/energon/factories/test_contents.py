"""What is in a shard that nobody has prepared."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import pytest

from energon_lite.errors import DatasetError, NotPreparedError, ShardFormatError
from energon_lite.extras.energon import BaseWebdatasetFactory, CrudeJsonlDatasetFactory, CrudeWebdataset

MEMBERS = ["a/1.jpg", "a/1.json", "__meta__/x.txt", "noext", "2.json", "2.seg.json", "3.jpg", "2.json"]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for number, name in enumerate(MEMBERS):
            info = tarfile.TarInfo(name)
            info.size = number
            tar.addfile(info, io.BytesIO(b"%d" % number * number))
        folder = tarfile.TarInfo("4.json")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    return tmp_path / "s.tar"


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    (tmp_path / "s.jsonl").write_bytes(b'{"n": 0}\n\n  {"n": 1}\n{"n": 2}')
    return tmp_path / "s.jsonl"


def test_samples_of_a_tar(shard: Path, tmp_path: Path) -> None:
    expected: list[dict[str, Any]] = [
        {"jpg": None, "json": b"1"},
        {"json": b"4444", "seg.json": None},
        {"jpg": None},
        {"json": b"7777777"},
    ]
    assert list(BaseWebdatasetFactory.iter_dataset_content(shard, ("json",))) == expected
    names = [dict.fromkeys(sample) for sample in expected]
    assert list(CrudeWebdataset.iter_dataset_content(str(shard))) == names
    (tmp_path / "s.tar.gz").write_bytes(gzip.compress(shard.read_bytes()))
    assert list(CrudeWebdataset.iter_dataset_content(tmp_path / "s.tar.gz")) == names
    fsspec.filesystem("memory").pipe_file("/contents/s.tar", shard.read_bytes())
    assert list(CrudeWebdataset.iter_dataset_content("memory://contents/s.tar")) == names


@pytest.mark.parametrize("kept", [0, 3300])
def test_what_is_no_whole_tar(shard: Path, kept: int) -> None:
    data = shard.read_bytes()
    shard.write_bytes(b"no tar" * 200 if not kept else data[:kept])
    with pytest.raises(ShardFormatError, match=r"s\.tar"):
        list(CrudeWebdataset.iter_dataset_content(shard, ("json",)))
    with pytest.raises(DatasetError, match="no such file"):
        next(CrudeWebdataset.iter_dataset_content(shard.with_name("gone.tar")))


def test_lines_of_a_file(lines: Path) -> None:
    found = list(CrudeJsonlDatasetFactory.iter_dataset_content(lines))
    assert found == [{"json": b'{"n": %d}' % number} for number in range(3)]
    with pytest.raises(NotPreparedError, match="no such JSONL file"):
        next(CrudeJsonlDatasetFactory.iter_dataset_content("gone.jsonl"))


def test_the_same_as_energon(shard: Path, lines: Path) -> None:
    pytest.importorskip("megatron.energon")
    from megatron.energon import BaseWebdatasetFactory as TheirTars
    from megatron.energon import CrudeJsonlDatasetFactory as TheirLines

    for keys in ((), ("json",), ("jpg", "seg.json")):
        theirs = list(TheirTars.iter_dataset_content(str(shard), keys))
        assert list(BaseWebdatasetFactory.iter_dataset_content(shard, keys)) == theirs
    # Theirs have the ends of lines, and the blank ones, which are no samples of theirs either.
    their_lines = [line["json"].strip() for line in TheirLines.iter_dataset_content(str(lines))]
    assert list(CrudeJsonlDatasetFactory.iter_dataset_content(lines)) == [{"json": one} for one in their_lines if one]
