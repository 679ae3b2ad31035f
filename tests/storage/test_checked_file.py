from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import DataIndexError
from energon_lite.storage.index import checked_file
from energon_lite.storage.index.checked_file import ALIGN, BLOCK, CheckedFile, FileKind, StoredArray, writing_checked

KIND = FileKind(b"ENRGLTST", 1, "test file", "make it again")
NUMBERS = np.arange(3 * 4000, dtype=np.int64).reshape(-1, 3)  # 12 blocks


def opened(path: Path) -> tuple[CheckedFile, StoredArray]:
    if not path.exists():
        with writing_checked(str(path), KIND) as writer:
            writer.write(NUMBERS.tobytes())
            writer.finish({})
    file = CheckedFile.open(str(path), KIND)
    return file, file.array("<i8", NUMBERS.shape, ALIGN)


@given(rows=st.lists(st.integers(0, 3990)), count=st.integers(1, 9), kept=st.sampled_from([0, 1, 100]))
def test_numbers_are_the_same_however_blocks_are_kept(tmp_path: Path, rows: list[int], count: int, kept: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked_file, "_KEPT", kept)
        file, array = opened(tmp_path / "a")
    assert (file.memory is None) == (kept < 12)
    first = np.array(rows, dtype=np.int64)
    assert (array.take(first, 0) == NUMBERS[first]).all()
    assert (array.stretches(first, count) == NUMBERS[first[:, None] + np.arange(count)]).all()
    expected = [NUMBERS[row : row + count].tobytes() for row in rows]
    assert file.read_each(ALIGN + 24 * first, np.full_like(first, 24 * count)) == expected
    assert [file.read(ALIGN + 24 * row, 24 * count) for row in rows] == expected


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
    with pytest.raises(DataIndexError, match="test file cannot be read"):
        file.read(ALIGN + BLOCK, 8)  # nobody has asked for this block before


def test_shared_memory_is_bounded_and_files_that_are_opened_twice_have_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_file, "_shared", type(checked_file._shared)())
    monkeypatch.setattr(checked_file, "_KEPT", 30)
    files = [opened(tmp_path / name) for name in "aabc"]
    memory = [file.memory for file, _ in files]
    assert memory[0] is memory[1] and memory[2] is not None and memory[3] is None
    assert sum(map(len, checked_file._shared.values())) < 30 * BLOCK
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
