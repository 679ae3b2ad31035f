"""Data that changed. Those that were corrected, at equal size and with an equal beginning: what is read next are the
new ones. Bytes that changed although a checksum says otherwise: they are found when they are read, and named.

All corrected tars here have times of 0 in their headers, as those of ``tarfile`` have, and are padded to 10 KiB:
neither their sizes nor their first blocks tell them apart.
"""

from __future__ import annotations

import gzip
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import ReadAhead, Reading, TaskEncoder
from energon_lite.errors import DataIndexError, DatasetError
from energon_lite.extras.media import JsonlFileStore, WebdatasetFileStore
from energon_lite.extras.remote import read_ahead as reading_ahead
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.prepare import prepare_dataset
from tests.servers import upload
from tests.tables_by_hand import write_mds, write_megatron
from tests.testing import examples, output_of, text_dataset, train_loader, val_loader, write_tar


def make(path: Path, word: str) -> None:
    """A folder of two shards; those of other words of this length differ from it in a few bytes of some samples."""
    for shard in range(2):
        samples = [(f"{shard}-{n}", {"txt": f"{word if n else 'first'} {n}".encode()}) for n in range(6)]
        write_tar(path / f"{shard}.tar", samples)


def prepare(path: Path) -> None:
    as_text = {"sample_type": "TextSample", "field_map": {"text": "txt"}}
    prepare_dataset(path, split_ratio="0,1,0", **as_text, sqlite=False, force_overwrite=True)


def in_place(path: Path, word: str) -> None:
    make(path.with_name("other"), word)
    for shard in sorted(path.glob("*.tar")):
        with shard.open("r+b") as file:
            file.write((path.with_name("other") / shard.name).read_bytes())


def by_rename(path: Path, word: str) -> None:
    make(path.with_name("other"), word)
    for shard in sorted(path.glob("*.tar")):
        os.replace(path.with_name("other") / shard.name, shard)


def by_rename_with_its_time(path: Path, word: str) -> None:
    times = {shard.name: shard.stat().st_mtime_ns for shard in path.glob("*.tar")}
    by_rename(path, word)
    for name, time in times.items():
        os.utime(path / name, ns=(time, time))


def whole_folder(path: Path, word: str) -> None:
    old = path.with_name("old")
    path.rename(old)
    make(path, word)
    shutil.copytree(old / ".nv-meta", path / ".nv-meta")
    shutil.rmtree(old)


CORRECTIONS = [in_place, by_rename, by_rename_with_its_time, whole_folder]


def texts(path: Any, read_ahead: ReadAhead | None = None) -> set[str]:
    with val_loader(path, batch_size=4, reading=Reading(read_ahead=read_ahead)) as loader:
        return {text.partition(" ")[0] for batch in loader for text in batch.text}


def read_aheads(tmp_path: Path) -> list[ReadAhead | None]:
    return [None, ReadAhead(), ReadAhead(folder=str(tmp_path / "ranges"))]


@pytest.mark.parametrize("correct", CORRECTIONS)
@pytest.mark.parametrize("prepared_again", [True, False])
def test_one_process_reads_what_is_there_now(
    correct: Callable[[Path, str], None], prepared_again: bool, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    make(path, "wrong")
    prepare(path)
    for read_ahead in read_aheads(tmp_path):
        assert texts(path, read_ahead) == {"first", "wrong"}
    for word in ("right", "again"):
        correct(path, word)
        if prepared_again:
            prepare(path)
        for read_ahead in read_aheads(tmp_path):
            assert texts(path, read_ahead) == {"first", word}, read_ahead
        reading_ahead._shared.clear()  # as in another process
        assert texts(path, read_aheads(tmp_path)[-1]) == {"first", word}


def test_an_unchanged_shard_is_fetched_once(tmp_path: Path) -> None:
    make(tmp_path / "data", "wrong")
    prepare(tmp_path / "data")
    read_ahead = ReadAhead(folder=str(tmp_path / "ranges"))
    texts(tmp_path / "data", read_ahead)
    kept = {file for file in (tmp_path / "ranges").rglob("*") if file.is_file()}
    prepare(tmp_path / "data")
    texts(tmp_path / "data", read_ahead)
    assert {file for file in (tmp_path / "ranges").rglob("*") if file.is_file()} == kept


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("prepared_again", [True, False])
@pytest.mark.usefixtures("memory")
def test_behind_a_url(prepared_again: bool, tmp_path: Path) -> None:
    path = tmp_path / "data"
    make(path, "wrong")
    prepare(path)
    url = upload(path, "bucket/data")
    for read_ahead in read_aheads(tmp_path):
        assert texts(url, read_ahead) == {"first", "wrong"}
    in_place(path, "right")
    if prepared_again:
        prepare(path)
    upload(path, "bucket/data", "*" if prepared_again else "*.tar")
    for read_ahead in read_aheads(tmp_path):
        assert texts(url, read_ahead) == {"first", "right"}, read_ahead


@pytest.mark.parametrize("remote", [False, True])
def test_a_jsonl_file(remote: bool, memory: Any, tmp_path: Path) -> None:
    def lines(word: str) -> bytes:
        return b"".join(b'{"text": "%b %d"}\n' % ((word if n > 60 else "first").encode(), n) for n in range(80))

    def read(read_ahead: ReadAhead | None) -> set[str]:
        with val_loader(path, batch_size=4, reading=Reading(read_ahead=read_ahead)) as loader:
            return {one.partition(" ")[0] for batch in loader for one in batch["json"]["text"]}

    path = "memory://bucket/a.jsonl" if remote else str(tmp_path / "a.jsonl")
    for word in ("wrong", "right"):
        if remote:
            memory.pipe_file("/bucket/a.jsonl", lines(word))
        else:
            (tmp_path / "b.jsonl").write_bytes(lines(word))
            os.replace(tmp_path / "b.jsonl", path)
        for read_ahead in read_aheads(tmp_path):
            assert read(read_ahead) == {"first", word}, read_ahead


@pytest.mark.parametrize("correct", CORRECTIONS)
def test_a_store_of_a_data_set(correct: Callable[[Path, str], None], tmp_path: Path) -> None:
    path, stores = tmp_path / "data", []
    for word in ("wrong", "right", "again"):
        make(path, word) if not stores else correct(path, word)
        prepare(path)
        stores.append(WebdatasetFileStore(path))  # the earlier ones are alive
        assert stores[-1]["1-3.txt"][0] == f"{word} 3".encode()
        kind, (*arguments,) = stores[-1].__reduce__()
        assert kind(*arguments)["1-3.txt"][0] == f"{word} 3".encode()
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n' * 100)
    assert JsonlFileStore(tmp_path / "a.jsonl")["99.json"][0] == b'{"a": 1}'
    (tmp_path / "b.jsonl").write_bytes(b'{"a": 1}\n' * 99 + b'{"a": 2}\n')
    os.replace(tmp_path / "b.jsonl", tmp_path / "a.jsonl")
    assert JsonlFileStore(tmp_path / "a.jsonl")["99.json"][0] == b'{"a": 2}'


def last_of(path: str, part: str) -> Any:
    with val_loader(path, batch_size=1) as loader:
        return [batch[part][0] for batch in loader][-1]


def replaced(folder: Path, write: Callable[[Path], object]) -> None:
    """Have files written elsewhere, and renamed into the folder."""
    write(folder.with_name("new"))
    folder.mkdir(exist_ok=True)
    for file in folder.with_name("new").iterdir():
        os.replace(file, folder / file.name)


def test_other_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    stored: dict[str, Any] = {"text": ("str", None)}
    for word in ("7", "8"):
        tokens = [[[1] * 60]] * 20 + [[[int(word)] * 60]]
        replaced(tmp_path / "megatron", lambda to: write_megatron(to / "text", tokens))  # noqa: B023
        assert last_of(f"megatron://{tmp_path}/megatron/text", "tokens")[0] == int(word)
        rows = [[[b"a" * 60]] * 20 + [[word.encode() * 60]]]
        replaced(tmp_path / "mds", lambda to: write_mds(to, stored, rows))  # noqa: B023
        assert last_of(str(tmp_path / "mds"), "text") == word * 60
        gzipped = partial(gzip.compress, compresslevel=0, mtime=0)
        replaced(tmp_path / "packed", lambda to: write_mds(to, stored, rows, gzipped, "gz"))  # noqa: B023
        assert last_of(str(tmp_path / "packed"), "text") == word * 60


# -- checksums


def measure_checksums(path: Path) -> str:
    return output_of("measure", path, "--checksums", "--num-workers", "0")


class Patient(TaskEncoder):
    failure_tolerance = 0


class OneByOne(Patient):
    def encode_sample(self, sample: Any) -> Any:
        return sample


def read(path: Path, encoder: TaskEncoder, **reading: Any) -> tuple[dict[str, str], int, str]:
    """All texts by key, how many samples failed, and what was said of them."""
    with val_loader(path, batch_size=4, task_encoder=encoder, reading=Reading(**reading)) as loader:
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


def write(path: Path, count: int = 40) -> Path:
    """Texts ``t0``, ``t1``, ... in three shards, all for validation."""
    text_dataset(path, count, shards=3, prefix="t")
    prepare(path)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "d")


@given(st.sets(st.integers(0, 39), max_size=6))
@settings(max_examples=examples(12))
def test_damaged_samples_fail_and_all_others_are_right(
    tmp_path_factory: pytest.TempPathFactory, lost: set[int]
) -> None:
    path = write(tmp_path_factory.mktemp("d") / "d")
    assert "40 parts have a checksum" in measure_checksums(path)
    damage(path, lost)
    for encoder, read_ahead in product((Patient(), OneByOne()), (None, ReadAhead())):
        found, failed, said = read(path, encoder, read_ahead=read_ahead)
        assert found == {f"t{n}": f"t{n}" for n in range(40) if n not in lost} and failed == len(lost)
        assert ("not those that were measured" in said) == bool(lost)


@pytest.mark.parametrize("workers", [0, 2])
def test_zeros_in_a_shard_become_no_text_of_a_run(workers: int, data: Path) -> None:
    measure_checksums(data)
    windows = {"batch_size": 5, "shuffle_buffer_size": 10, "max_samples_per_sequence": 5}
    with train_loader(data, workers, split_part="val", task_encoder=Patient(), **windows) as loader:
        batches = iter(loader)
        next(batches)
        damage(data, {3, 17, 31})
        texts = {text for _ in range(40) for text in next(batches).text}
        assert loader.stats()["failed"]
    assert texts <= {f"t{n}" for n in range(40)}


def test_checksums_that_are_older_than_the_data_are_refused_until_they_are_made_again(data: Path) -> None:
    """And a store of files verifies its parts."""
    output_of("prepare", data, "--tar-index-only", "--checksums", "--num-workers", "1")
    assert len(read(data, Patient())[0]) == 40
    write(data, 44)
    with pytest.raises(DataIndexError, match="'checksums' is older than the data set") as caught:
        read(data, Patient())
    output_of(*shlex.split(str(caught.value.fix).rpartition(": energon-lite ")[2]))
    assert len(read(data, Patient())[0]) == 44
    damage(data, {7})
    assert WebdatasetFileStore(data)["t8.txt"][0] == b"t8"
    with pytest.raises(DatasetError, match=r"part 'txt'[\s\S]*shard-000\.tar, t7") as failed:
        WebdatasetFileStore(data)["t7.txt"]
    assert "checksum" in str(failed.value)
    command = str(failed.value.fix).partition("`energon-lite ")[2].rstrip("`")
    output_of(*shlex.split(command))  # it is right as it is, the user says
    assert WebdatasetFileStore(data)["t7.txt"][0] == bytes(2)
    os.unlink(data / ".nv-meta" / "energon_lite.columns" / "checksums.ragged")
    assert read(data, Patient())[1] == 0  # nothing is promised without


def test_checksums_of_a_jsonl_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "t{n}"}}\n' for n in range(99)))
    measure_checksums(path)
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(path.read_bytes()[1000:1100].replace(b"t", b"X"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with val_loader(path, batch_size=4) as loader:
        texts = [text for batch in loader for text in batch["json"]["text"]]
        assert loader.stats()["failed"] > 3 and len(texts) > 80 and not any("X" in text for text in texts)
