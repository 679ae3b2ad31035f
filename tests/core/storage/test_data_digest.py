from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from energon_lite.storage.files.shard_store import ShardStore
from energon_lite.storage.read.opened_source import data_digest
from energon_lite.storage.read.webdataset import WebdatasetSource


def digest_of(write_dataset: Any, path: Path, texts: list[bytes], time: int = 0) -> str:
    samples = [(f"{number:03}", {"txt": text}) for number, text in enumerate(texts)]
    write_dataset(path, {"a.tar": samples[: len(samples) // 2], "b.tar": samples[len(samples) // 2 :]})
    for name in ("a.tar", "b.tar"):
        with tarfile.open(path / name) as tar:
            members = [(member, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]
        with tarfile.open(path / name, "w", format=tarfile.USTAR_FORMAT) as tar:
            for member, data in members:
                member.mtime = time
                tar.addfile(member, io.BytesIO(data))
    return data_digest(WebdatasetSource.open(path))


def test_the_data_count_and_neither_place_nor_time(write_dataset: Any, tmp_path: Path) -> None:
    texts = [f"{number:04}".encode() for number in range(60)]
    digest = digest_of(write_dataset, tmp_path / "one", texts)
    assert digest == digest_of(write_dataset, tmp_path / "later", texts, time=1_700_000_000)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    assert digest == data_digest(WebdatasetSource.open(tmp_path / "copy"))
    for changed in (0, 17, 29, 30, 44, 59):  # all samples of a small data set count
        other = [b"xxxx" if number == changed else text for number, text in enumerate(texts)]
        assert digest != digest_of(write_dataset, tmp_path / f"other-{changed}", other)


def test_neighbours_are_read_at_once(write_dataset: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening must not wait for one read a sample, which slow storage would make of it."""
    reads: list[int] = []
    fetch = ShardStore.fetch

    def counted(store: ShardStore, ranges: Any) -> Any:
        reads.extend(size for (path, _), _, size in ranges if path.endswith(".tar"))
        return fetch(store, ranges)

    monkeypatch.setattr(ShardStore, "fetch", counted)
    digest_of(write_dataset, tmp_path / "small", [b"text"] * 60)  # four places, none of which is in two shards
    assert len(reads) == 4
    digest_of(write_dataset, tmp_path / "large", [b"text" * 20_000] * 60)
    assert reads[4:] == [1 << 16] * 4
