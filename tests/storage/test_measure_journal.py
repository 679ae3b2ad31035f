from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from damage import damaged
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import DataIndexError
from energon_lite.storage.index.index_cache import find_or_make_index
from energon_lite.storage.index.measure_journal import CHUNK, Chunk, Chunks, JournalReader, JournalWriter, Measured
from energon_lite.storage.index.nv_meta import read_info
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.prepare.prepare import prepare_dataset

MAKER = {"by": "test"}


def chunks_of(folder: Path) -> Chunks:
    return Chunks(find_or_make_index(str(folder), read_info(str(folder)))[0])


def measured(chunk: Chunk, failed: int = 0) -> Measured:
    samples = np.arange(chunk.start, chunk.stop)
    return Measured(
        samples * 3, np.where(np.arange(len(samples)) < failed, 2, 0).astype(np.uint8), [["e", "why", False, "k"]]
    )


@pytest.fixture
def chunks(make_tar: Callable[..., Path], tmp_path: Path) -> Chunks:
    """Shards of 300, 5 and 256 samples: chunks of 256, 44, 5 and 256."""
    for shard, count in (("a.tar", 300), ("b.tar", 5), ("c.tar", 256)):
        make_tar(f"d/{shard}", [(f"{shard[0]}{n}.txt", b"x") for n in range(count)])
    prepare_dataset(tmp_path / "d", split_ratio="1,0,0", sqlite=False)
    return chunks_of(tmp_path / "d")


def reader_of(folder: Path, chunks: Chunks) -> JournalReader:
    reader = JournalReader(str(folder), chunks, lambda maker: maker == MAKER)
    reader.look()
    return reader


def test_chunks_cover_all_samples_once(chunks: Chunks) -> None:
    assert CHUNK == 256 and len(chunks) == 4
    assert [chunks[number] for number in range(4)] == [
        Chunk(0, 0, 256),
        Chunk(0, 256, 300),
        Chunk(1, 300, 305),
        Chunk(2, 305, 561),
    ]
    assert chunks.sizes.tolist() == [256, 44, 5, 256]


@given(st.lists(st.integers(0, 1000), max_size=6))
def test_chunks_of_any_shards(counts: list[int]) -> None:
    index = PackedIndex.from_scans([])
    index.shard_names = tuple(map(str, range(len(counts))))
    index.shard_times = np.zeros(len(counts), dtype=np.int64)
    index.shards = np.zeros((len(counts) + 1, 5), dtype=np.int64)
    index.shards[:, 3] = np.cumsum([0, *counts])
    chunks = Chunks(index)
    found = [chunks[number] for number in range(len(chunks))]
    assert [sample for chunk in found for sample in range(chunk.start, chunk.stop)] == list(range(sum(counts)))
    assert chunks.sizes.tolist() == [chunk.stop - chunk.start for chunk in found]
    edges = index.shards[:, 3].tolist()
    assert all(edges[chunk.row] <= chunk.start < chunk.stop <= edges[chunk.row + 1] for chunk in found)


@settings(max_examples=examples(200))
@given(st.data())
def test_flipped_bits_and_cuts_never_give_other_values(chunks: Chunks, tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / f"journals-{len(list(tmp_path.iterdir()))}"
    writer = JournalWriter(str(folder), 0, MAKER)
    for number in range(4):
        writer.append(chunks, chunks[number], measured(chunks[number]))
    writer.close()
    (path,) = folder.iterdir()
    path.write_bytes(damaged(data, path.read_bytes()))
    reader = reader_of(folder, chunks)
    for number in np.flatnonzero(reader.known).tolist():
        found = reader.read(number)
        assert found.lengths.tolist() == measured(chunks[number]).lengths.tolist() and not found.flags.any()


def test_a_journal_that_is_damaged_after_it_was_read(chunks: Chunks, tmp_path: Path) -> None:
    folder = tmp_path / "journals"
    writer = JournalWriter(str(folder), 0, MAKER)
    writer.append(chunks, chunks[0], measured(chunks[0]))
    writer.close()
    reader = reader_of(folder, chunks)
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DataIndexError, match=r"journal[\s\S]*measure again"):
        reader.read(0)


def test_what_is_written_is_found_by_all(chunks: Chunks, tmp_path: Path) -> None:
    folder = tmp_path / "journals"
    early = reader_of(folder, chunks)
    assert not early.known.any()
    writers = [JournalWriter(str(folder), rank, MAKER) for rank in (0, 1)]
    for number in (3, 0, 2):
        writers[number % 2].append(chunks, chunks[number], measured(chunks[number]))
        assert early.look() == chunks.sizes[number]  # as it comes, each once
    assert early.look() == 0
    for reader in (early, reader_of(folder, chunks)):
        assert reader.known.tolist() == [True, False, True, True]
        for number in (0, 2, 3):
            found, expected = reader.read(number), measured(chunks[number])
            assert found.lengths.tolist() == expected.lengths.tolist() and found.reasons == expected.reasons
            assert found.flags.tolist() == expected.flags.tolist()


def test_an_unused_writer_leaves_no_file(tmp_path: Path) -> None:
    JournalWriter(str(tmp_path / "journals"), 0, MAKER).close()
    assert not (tmp_path / "journals").exists()


def test_a_torn_end_hides_nothing_but_itself(chunks: Chunks, tmp_path: Path) -> None:
    folder = tmp_path / "journals"
    writer = JournalWriter(str(folder), 0, MAKER)
    ends = []
    for number in range(3):
        writer.append(chunks, chunks[number], measured(chunks[number]))
        ends.append(next(folder.iterdir()).stat().st_size)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        reader = reader_of(folder, chunks)
        assert reader.known.sum() == sum(end <= size for end in ends)
        path.write_bytes(whole)
        reader.look()  # the writer goes on, and so does the reader
        assert reader.known.tolist() == [True, True, True, False]
    for place in (ends[0] + 9, ends[0] + 60, ends[1] - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert reader_of(folder, chunks).known.tolist() == [True, False, False, False]


def test_records_of_others_do_not_count(chunks: Chunks, tmp_path: Path, make_tar: Callable[..., Path]) -> None:
    folder = tmp_path / "journals"
    JournalWriter(str(folder), 0, {"by": "another"}).append(chunks, chunks[1], measured(chunks[1]))
    assert not reader_of(folder, chunks).known.any()
    writer = JournalWriter(str(folder), 0, MAKER)
    for number in range(4):
        writer.append(chunks, chunks[number], measured(chunks[number]))
    make_tar("d/a.tar", [(f"new{n}.txt", b"xyz") for n in range(300)])
    make_tar("d/aa.tar", [("new.txt", b"xyz")])
    prepare_dataset(tmp_path / "d", split_ratio="1,0,0", force_overwrite=True, sqlite=False)
    now = chunks_of(tmp_path / "d")
    assert reader_of(folder, now).known.tolist() == [False, False, False, True, True]
    assert reader_of(folder, now).read(4).lengths[0] == 305 * 3  # what was measured as sample 305 is sample 306 now


@pytest.mark.parametrize("order", [(2, 0, 1), (0, 2, 1), (1, 2, 0)])
def test_the_attempt_with_fewest_failures_counts(chunks: Chunks, tmp_path: Path, order: tuple[int, ...]) -> None:
    for failed in order:
        JournalWriter(str(tmp_path / "j"), 0, MAKER).append(chunks, chunks[2], measured(chunks[2], failed))
    reader = reader_of(tmp_path / "j", chunks)
    assert reader.failed[2] == 0 and reader.read(2).flags.tolist() == [0] * 5
