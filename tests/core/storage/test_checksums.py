"""Parts with checksums: bytes that changed at equal size are found when they are read, and named."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import ReadAhead, Reading, TaskEncoder, get_savable_loader, get_train_dataset, get_val_dataset
from energon_lite.errors import DataIndexError, DatasetError
from energon_lite.extras.media import WebdatasetFileStore
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.prepare.prepare import prepare_dataset
from tests.testing import ALONE, TEXT_YAML, alone, examples, output_of, text_dataset


def run(*arguments: str) -> str:
    return output_of(*arguments)


class Patient(TaskEncoder):
    failure_tolerance = 0


class OneByOne(Patient):
    def encode_sample(self, sample: Any) -> Any:
        return sample


def read(path: Path, encoder: TaskEncoder, workers: int = 0, **reading: Any) -> tuple[dict[str, str], int, str]:
    """All texts by key, how many samples failed, and what was said of them."""
    dataset = get_val_dataset(
        path, batch_size=4, worker_config=alone(workers), task_encoder=encoder, reading=Reading(**reading)
    )
    with get_savable_loader(dataset) as loader:
        found = {key: text for batch in loader for key, text in zip(batch.__key__, batch.text, strict=True)}
        return found, loader.stats()["failed"], str(loader.stats())


def damage(path: Path, samples: set[int]) -> None:
    """Put zeros over the texts of some samples, in place."""
    index = PackedIndex.open(str(path / ".nv-meta" / "energon_lite.idx"))
    for sample in samples:
        row = int(index.shards[:, 3].searchsorted(sample, "right")) - 1
        offset, size, _ = index.key_and_part_rows(sample)[1]
        with (path / index.shard_names[row]).open("r+b") as file:
            file.seek(offset)
            file.write(bytes(size))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = text_dataset(tmp_path / "d", 40, shards=3, prefix="t")
    prepare_dataset(path, split_ratio="0,1,0", sqlite=False, force_overwrite=True)
    (path / ".nv-meta" / "dataset.yaml").write_text(TEXT_YAML)
    return path


WAYS: list[tuple[TaskEncoder, dict[str, Any]]] = [
    (Patient(), {}),
    (OneByOne(), {}),
    (Patient(), {"read_ahead": ReadAhead()}),
    (OneByOne(), {"read_ahead": ReadAhead()}),
]


@given(st.sets(st.integers(0, 39), max_size=6))
@settings(max_examples=examples(12))
def test_damaged_samples_fail_and_all_others_are_right(
    tmp_path_factory: pytest.TempPathFactory, lost: set[int]
) -> None:
    path = text_dataset(tmp_path_factory.mktemp("d") / "d", 40, shards=3, prefix="t")
    prepare_dataset(path, split_ratio="0,1,0", sqlite=False, force_overwrite=True)
    assert "40 parts have a checksum" in run("measure", str(path), "--checksums", "--num-workers", "0")
    damage(path, lost)
    for encoder, reading in WAYS:
        found, failed, said = read(path, encoder, **reading)
        assert found == {f"t{n}": f"t{n}" for n in range(40) if n not in lost} and failed == len(lost)
        assert ("not those that were measured" in said) == bool(lost)


@pytest.mark.parametrize("workers", [0, 2])
def test_zeros_in_a_shard_become_no_text_of_a_run(workers: int, data: Path) -> None:
    run("measure", str(data), "--checksums", "--num-workers", "0")
    dataset = get_train_dataset(
        data,
        split_part="val",
        batch_size=5,
        worker_config=alone(workers),
        task_encoder=Patient(),
        shuffle_buffer_size=10,
        max_samples_per_sequence=5,
    )
    with get_savable_loader(dataset) as loader:
        batches = iter(loader)
        next(batches)
        damage(data, {3, 17, 31})
        texts = {text for _ in range(40) for text in next(batches).text}
        assert loader.stats()["failed"]
    assert texts <= {f"t{n}" for n in range(40)}


def test_a_store_verifies_its_parts(data: Path) -> None:
    run("measure", str(data), "--checksums", "--num-workers", "0")
    damage(data, {20})
    store = WebdatasetFileStore(data)
    assert store["t21.txt"][0] == b"t21"
    with pytest.raises(DatasetError, match=r"part 'txt'[\s\S]*shard-001\.tar, t20"):
        store["t20.txt"]


def test_checksums_that_are_older_than_the_data_are_refused_until_they_are_made_again(
    data: Path, write_dataset: Callable[..., Path]
) -> None:
    run("prepare", str(data), "--tar-index-only", "--checksums", "--num-workers", "1")
    assert len(read(data, Patient())[0]) == 40
    text_dataset(data, 44, shards=3, prefix="t")
    prepare_dataset(data, split_ratio="0,1,0", sqlite=False, force_overwrite=True)
    with pytest.raises(DataIndexError, match="'checksums' is older than the data set") as caught:
        read(data, Patient())
    run(*shlex.split(str(caught.value.fix).rpartition(": energon-lite ")[2]))
    assert len(read(data, Patient())[0]) == 44
    damage(data, {7})
    with pytest.raises(DatasetError, match="checksum") as failed:
        WebdatasetFileStore(data)["t7.txt"]
    command = str(failed.value.fix).partition("`energon-lite ")[2].rstrip("`")
    run(*shlex.split(command))  # it is right as it is, the user says
    assert WebdatasetFileStore(data)["t7.txt"][0] == bytes(2)
    os.unlink(data / ".nv-meta" / "energon_lite.columns" / "checksums.ragged")
    assert read(data, Patient())[1] == 0  # nothing is promised without


def test_a_jsonl_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "t{n}"}}\n' for n in range(99)))
    run("measure", str(path), "--checksums", "--num-workers", "0")
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(path.read_bytes()[1000:1100].replace(b"t", b"X"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with get_savable_loader(get_val_dataset(path, batch_size=4, worker_config=ALONE)) as loader:
        texts = [text for batch in loader for text in batch["json"]["text"]]
        assert loader.stats()["failed"] > 3 and len(texts) > 80 and not any("X" in text for text in texts)
