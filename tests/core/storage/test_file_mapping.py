"""Files in memory that are not kept open."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from energon_lite.storage.files import byte_ranges
from energon_lite.storage.files.byte_ranges import map_file


def _mapped(path: Path) -> memoryview:
    with open(path, "rb") as file:
        return map_file(file.fileno())


def _places(path: Path) -> int:
    """In how many places of this process's memory a file is."""
    return Path("/proc/self/maps").read_text().count(str(path))


@pytest.mark.parametrize("size", [1, 4096, 100_001])
def test_the_bytes_of_the_file(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    view = _mapped(path)
    assert bytes(view) == path.read_bytes() and view.readonly
    with pytest.raises(TypeError):
        view[0] = 0
    assert not np.frombuffer(view, dtype=np.uint8).flags.writeable


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert bytes(_mapped(path)) == b""


def test_no_file_stays_open_and_the_memory_goes_with_the_last_view(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    before = sorted(os.listdir("/proc/self/fd"))
    array = np.frombuffer(_mapped(path)[256:], dtype=np.uint8)  # only an array over a part of it refers to it
    assert sorted(os.listdir("/proc/self/fd")) == before
    gc.collect()
    assert _places(path) == 1
    path.unlink()
    assert array[:3].tolist() == [0, 1, 2]
    del array
    gc.collect()
    assert _places(path) == 0


def test_what_cannot_be_mapped(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    fd = os.open(tmp_path / "file", os.O_WRONLY)
    with pytest.raises(OSError, match=os.strerror(13)):
        byte_ranges.map_file(fd)
    os.close(fd)
