from __future__ import annotations

import gc
import io
import os
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

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


def _private_memory() -> int:
    """Bytes of this process that no other one shares."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Private_"))


@pytest.fixture
def private_growth() -> Callable[..., list[int]]:
    """``private_growth(work, workers=4)``: by how many bytes the private memory of forked workers grows, each of which
    does ``work`` (which returns whether it went well), measured while all of them are alive."""
    if not os.path.exists("/proc/self/smaps_rollup"):
        pytest.skip("needs Linux")

    def grow(work: Callable[[], bool], workers: int = 4) -> list[int]:
        gc.collect()
        ready, go, leave = os.pipe(), os.pipe(), os.pipe()
        answers = []
        for _ in range(workers):
            answer = os.pipe()
            if not os.fork():
                try:
                    before = _private_memory()
                    os.write(ready[1], b"." if work() else b"!")
                    os.read(go[0], 1)  # a page counts as shared while another worker has it, too
                    os.write(answer[1], str(_private_memory() - before).encode())
                    os.read(leave[0], 1)  # none leaves before all have measured
                    os._exit(0)
                except BaseException:
                    os._exit(1)
            os.close(answer[1])
            answers.append(answer[0])
        os.close(ready[1])
        assert b"".join(os.read(ready[0], 1) for _ in range(workers)) == b"." * workers
        growth = []
        os.write(go[1], b"." * workers)
        for end in answers:
            growth.append(int(os.read(end, 30)))
            os.close(end)
        os.write(leave[1], b"." * workers)
        assert all(os.wait()[1] == 0 for _ in range(workers))
        for end in (ready[0], *go, *leave):
            os.close(end)
        return growth

    return grow
