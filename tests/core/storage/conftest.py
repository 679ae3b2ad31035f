from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from energon_lite.storage.prepare import prepare_dataset

MakeTar = Callable[..., Path]


@pytest.fixture
def make_tar(tmp_path: Path) -> MakeTar:
    """``make_tar(name, [(member, data), ...])`` writes a tar with these members; returns its path."""

    def make(name: str, members: Sequence[tuple[str, bytes]], tar_format: int = tarfile.USTAR_FORMAT) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w", format=tar_format) as tar:
            for member, data in members:
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return path

    return make


@pytest.fixture
def ten(tmp_path: Path, make_tar: MakeTar) -> Path:
    """A folder of three shards with 4 + 3 + 3 samples ``0`` .. ``9`` of two parts each; not prepared."""
    numbers = iter(range(10))
    for shard, count in (("a.tar", 4), ("b.tar", 3), ("sub/c.tar", 3)):
        members = []
        for number in [next(numbers) for _ in range(count)]:
            members += [(f"{number}.txt", f"text {number}".encode()), (f"{number}.cls", str(number).encode())]
        make_tar(f"ten/{shard}", members)
    return tmp_path / "ten"


@pytest.fixture
def data(ten: Path) -> Path:
    """The same, prepared."""
    prepare_dataset(ten, split_ratio="1,0,0", sqlite=False)
    return ten
