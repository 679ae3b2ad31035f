"""The container of the library's own formats: what is written is read, whole or block by block, or an error."""

from __future__ import annotations

import json
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from energon_lite.errors import DataIndexError
from energon_lite.storage.files import stored_array
from energon_lite.storage.files.array_file import ALIGN, BLOCK, FileKind, read_arrays, write_arrays, writing
from energon_lite.storage.files.stored_array import FileBody, StoredArray, open_arrays
from tests.testing import damaged, examples

KIND = FileKind(b"ENRGLTST", 1, "test file", "make it again")
NUMBERS = np.arange(3 * 4000, dtype=np.int64).reshape(-1, 3)  # 12 blocks


def opened(path: Path) -> tuple[FileBody, StoredArray]:
    if not path.exists():
        write_arrays(str(path), KIND, {"numbers": NUMBERS}, {})
    array = open_arrays(str(path), KIND)[0]["numbers"]
    return array._body, array


shapes = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
values = shapes.flatmap(
    lambda shape: st.sampled_from(["<i8", "|u1", ">i4", "<f4", "|b1"]).flatmap(
        lambda dtype: arrays_of.arrays(np.dtype(dtype), shape, elements={"allow_nan": False} if "f" in dtype else None)
    )
)


@given(st.dictionaries(st.text(max_size=4), values, max_size=4), st.dictionaries(st.text(max_size=3), st.integers()))
def test_what_is_written_is_read(tmp_path: Path, arrays: dict[str, Any], meta: dict[str, int]) -> None:
    path = str(tmp_path / "a")
    write_arrays(path, KIND, arrays, meta)
    whole, found = read_arrays(path, KIND)
    stored, also_found = open_arrays(path, KIND)
    assert found == also_found == meta and whole.keys() == stored.keys() == arrays.keys()
    for name, array in arrays.items():
        for got in (whole[name], stored[name][:], np.asarray(stored[name])):
            assert (got.dtype, got.shape) == (array.dtype, array.shape) and (got == array).all()


def test_an_array_may_come_in_chunks_and_meta_at_the_end(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    with writing(path, KIND, {"n": 1}) as file:
        file.add("small", np.arange(3, dtype=np.uint8))
        file.stream("numbers", "<i8", (3,), (row.tobytes() for row in NUMBERS))
        file.meta["m"] = 2
    arrays, meta = read_arrays(path, KIND)
    assert meta == {"n": 1, "m": 2} and (arrays["numbers"] == NUMBERS).all() and arrays["small"].tolist() == [0, 1, 2]
    write_arrays(str(tmp_path / "b"), KIND, {"small": np.arange(3, dtype=np.uint8), "numbers": NUMBERS}, meta)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize(
    "table",
    [{}, {"arrays": {}}, {"arrays": {}, "meta": {}}, {"arrays": {"x": 1}, "meta": {}}, {"arrays": 5, "meta": {}}, []],
)
def test_a_table_that_says_something_else(tmp_path: Path, table: Any) -> None:
    text = struct.pack("<I", 0) + json.dumps(table).encode()  # the checksum of an empty body
    head = struct.pack("<IQQI28x", 1, 64, len(text) - 4, zlib.crc32(text))
    (tmp_path / "a").write_bytes(struct.pack("<8sI", b"ENRGLTST", zlib.crc32(head)) + head + text)
    for read in (read_arrays, open_arrays):
        if table == {"arrays": {}, "meta": {}}:
            assert read(str(tmp_path / "a"), KIND) == ({}, {})
            continue
        with pytest.raises(DataIndexError, match="table"):
            read(str(tmp_path / "a"), KIND)


@settings(max_examples=examples(200))
@given(st.data())
def test_damage_is_an_error_or_changes_nothing(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "a"
    write_arrays(str(path), KIND, {"numbers": NUMBERS[:500]}, {"k": 1})
    path.write_bytes(damaged(data, path.read_bytes()))
    with suppress(DataIndexError):
        arrays, meta = read_arrays(str(path), KIND)
        assert meta == {"k": 1} and (arrays["numbers"] == NUMBERS[:500]).all()
    with suppress(DataIndexError):
        stored, meta = open_arrays(str(path), KIND)
        assert meta == {"k": 1} and (stored["numbers"][:] == NUMBERS[:500]).all()


@given(rows=st.lists(st.integers(0, 3990)), count=st.integers(1, 9), kept=st.sampled_from([0, 1, 100]))
def test_numbers_are_the_same_however_blocks_are_kept(tmp_path: Path, rows: list[int], count: int, kept: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_array, "_KEPT", kept)
        patch.setattr(stored_array, "_taken", {})  # by files that others have open
        file, array = opened(tmp_path / "a")
    assert (file.memory is None) == (kept < 12)
    first = np.array(rows, dtype=np.int64)
    assert (array.take(first, 0) == NUMBERS[first]).all()
    assert (array.stretches(first, count) == NUMBERS[first[:, None] + np.arange(count)]).all()
    expected = [NUMBERS[row : row + count].tobytes() for row in rows]
    assert file.read_each(ALIGN + 24 * first, np.full_like(first, 24 * count)) == expected
    assert array.raw_each(np.stack([first, first + count], 1)) == expected
    assert [file.read(ALIGN + 24 * row, 24 * count) for row in rows] == expected
    assert (array[::7] == NUMBERS[::7]).all()


def test_what_a_forked_process_has_verified_is_right_for_all_of_them_whatever_happens_to_the_file(
    tmp_path: Path,
) -> None:
    file, array = opened(tmp_path / "a")
    last = len(NUMBERS) - 1
    child = os.fork()
    if not child:
        found = (array.take(np.arange(2000, last), 0) == NUMBERS[2000:last]).all()
        os._exit(0 if found else 1)
    assert os.waitpid(child, 0)[1] == 0
    os.truncate(tmp_path / "a", 100)
    assert (array.take(np.arange(2000, last), 0) == NUMBERS[2000:last]).all()
    with pytest.raises(DataIndexError, match=r"test file cannot be read[\s\S]*start the run again"):
        file.read(ALIGN + BLOCK, 8)  # nobody has asked for this block before


def test_shared_memory_is_bounded_and_files_that_are_opened_twice_have_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_array, "_shared", type(stored_array._shared)())
    monkeypatch.setattr(stored_array, "_taken", {})
    monkeypatch.setattr(stored_array, "_KEPT", 30)
    files = [opened(tmp_path / name) for name in "aabc"]
    memory = [file.memory for file, _ in files]
    assert memory[0] is memory[1] and memory[2] is not None and memory[3] is None
    assert sum(map(len, stored_array._shared.values())) < 30 * BLOCK
    del files[2], memory
    assert opened(tmp_path / "c")[0].memory is not None  # b has given its back


def test_places_outside_are_refused(tmp_path: Path) -> None:
    file, array = opened(tmp_path / "a")
    for offset in (-8, 0, ALIGN + NUMBERS.nbytes):
        with pytest.raises(DataIndexError, match="there are no"):
            file.read_each(np.array([offset]), np.array([8]))
        with pytest.raises(DataIndexError, match="there are no"):
            file.read(offset, 8)
    with pytest.raises(IndexError):
        array.take(np.array([len(NUMBERS)]), 0)
