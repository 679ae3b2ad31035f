"""Folders and buckets of checksummed files, with several writers."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.extras.remote.checked_bucket import CheckedBucket
from energon_lite.extras.remote.checked_folder import CheckedFolder
from tests.extras.remote.stored_files import files_in, objects, size_of
from tests.testing import examples, nightly_but


@settings(max_examples=examples(60))
@given(st.data())
def test_what_comes_next_stays(data: st.DataObject) -> None:
    """A folder never exceeds its size, and only removes files that are needed later than all others."""
    sizes = data.draw(st.lists(st.integers(1, 300), min_size=4, max_size=24))
    limit = data.draw(st.integers(400, 1000))
    needed = data.draw(st.permutations(range(len(sizes))))
    with tempfile.TemporaryDirectory() as name:

        def distances(paths: Sequence[str]) -> list[float]:
            return [float(needed[int(os.path.basename(path))]) for path in paths]

        def folder() -> CheckedFolder:
            return CheckedFolder(name, limit, option="store", kept="kept", distances=distances)

        folders = [folder(), folder()]
        for number, size in enumerate(sizes):
            before = {int(path.name) for path in files_in(Path(name))}
            chosen = data.draw(st.sampled_from(folders))
            path = chosen.file("00", str(number))
            is_written = chosen.write(path, bytes([number]) * size, lambda number=number: float(needed[number]))
            there = {int(path.name) for path in files_in(Path(name))}
            assert size_of(files_in(Path(name))) <= limit
            assert there - before == {number} & there and is_written == (number in there)
            for gone in before - there:
                assert needed[gone] > max([2 * needed[number], *(needed[kept] for kept in there - {number})])
            assert is_written or 2 * needed[number] >= min(needed[:number])
        for number in there:
            assert bytes(folders[0].find(folders[0].file("00", str(number))) or b"") == bytes([number]) * sizes[number]


def test_writers_race_in_a_bucket(bucket: str) -> None:
    values = {f"{number:02x}": bytes([number]) * 5000 for number in range(40)}

    def write(_: int) -> None:
        store = CheckedBucket(bucket, 1 << 30, option="store", kept="kept", distances=lambda paths: [0.0] * len(paths))
        for name, value in values.items():
            store.write(store.file(name, name), value)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    store = CheckedBucket(bucket, 1 << 30, option="store", kept="kept", distances=lambda paths: [0.0] * len(paths))
    assert len(objects()) == 40
    for name, value in values.items():
        assert bytes(store.find(store.file(name, name)) or b"") == value


@pytest.mark.parametrize("kills", nightly_but({0}, [40, *range(1000, 1010)]))
def test_writers_that_are_killed_leave_whole_files(tmp_path: Path, kills: int) -> None:
    """Two writers at a time, in a folder with room for two thirds; each file is whole, or missing."""
    values = [bytes([number]) * (1000 + 200 * number) for number in range(12)]
    limit = 2 * sum(map(len, values)) // 3
    random = Random(kills)
    parent, (written, write) = os.getpid(), os.pipe()

    def start() -> int:
        order = random.sample(range(12), 12)
        if child := os.fork():
            return child
        try:
            os.close(written)
            folder = CheckedFolder(str(tmp_path / "store"), limit, option="store")
            while os.getppid() == parent:  # which a limit of time may have ended
                for number in order:
                    folder.write(folder.place(b"%d" % number), values[number])
                    os.write(write, b"1")
        except BaseException as error:
            (tmp_path / "error").write_text(repr(error))
        finally:
            os._exit(1)

    folder = CheckedFolder(str(tmp_path / "store"), limit, option="store")
    writers, found = [start(), start()], Counter[bool]()
    for kill in range(kills):
        os.read(written, 1 << 16)  # waits for one more file: else all might be killed before there is any
        time.sleep(0.004 * random.random())
        victim = writers.pop(0)
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        writers.append(start())
        read = folder.find(folder.place(b"%d" % (kill % 12)))
        found[read is None] += 1
        assert read is None or read == values[kill % 12]
    for victim in writers:
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
    os.close(written)
    os.close(write)
    assert [path.read_text() for path in tmp_path.glob("error")] == []
    assert not folder.damaged and min(found[True], found[False]) > kills // 20
    assert sum(path.stat().st_size for path in files_in(tmp_path / "store")) <= limit + 2 * len(values[-1])
