"""A store of samples changes no batch, whatever happens to its files, its disk, its bucket, and its writers."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import DatasetError, UsageError
from energon_lite.extras.remote import SampleStore, checked_bucket
from tests.extras.remote.store_runs import LARGE, Plain, store_in
from tests.extras.remote.stored_files import files_in
from tests.testing import damaged, examples, nightly_but


@settings(max_examples=examples(12))
@given(st.data())
def test_a_damaged_file_is_made_again(
    run: Callable[..., Any], tmp_path: Path, same: Callable[..., bool], data: st.DataObject
) -> None:
    expected, _ = run(store_in(tmp_path), count=8)
    for path in data.draw(st.lists(st.sampled_from(files_in(tmp_path / "store")), min_size=1, max_size=4, unique=True)):
        path.write_bytes(damaged(data, path.read_bytes()))
    assert same(run(store_in(tmp_path), count=8)[0], expected)


def test_a_bucket_that_fails_is_told_once(
    run: Callable[..., Any],
    bucket: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    same: Callable[..., bool],
) -> None:
    expected, _ = run(None)
    store = SampleStore(bucket, max_bytes=LARGE)
    put = checked_bucket.put_bytes

    def full(url: str, name: str, data: bytes) -> None:
        if data:
            raise DatasetError("no space is left there", where=url)
        put(url, name, data)

    monkeypatch.setattr(checked_bucket, "put_bytes", full)
    assert same(run(store)[0], expected)
    assert caplog.text.count("no space is left there") == 1
    with pytest.raises(UsageError, match="nothing can be written"):
        run(SampleStore("http://127.0.0.1:9/samples", max_bytes=LARGE))


def test_a_full_disk_is_told_once(
    run: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    same: Callable[..., bool],
) -> None:
    expected, _ = run(None)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert same(run(store_in(tmp_path))[0], expected)
    assert caplog.text.count("No space left on device") == 1
    assert not files_in(tmp_path / "store")


def test_a_disk_that_is_full_indeed(
    run: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, same: Callable[..., bool]
) -> None:
    """A disk of 64 KiB, which root can make of memory: what it had room for is found."""
    (disk := tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root, and a system that lets it mount")
    try:
        arguments: dict[str, Any] = {"encoder": Plain(tmp_path / "calls"), "samples": 64, "count": 32}
        expected, most = run(None, **arguments)
        store = SampleStore(str(disk / "store"), max_bytes=LARGE, checked=0)
        assert same(run(store, **arguments)[0], expected)
        assert caplog.text.count("No space left on device") == 1
        found, calls = run(store, **arguments)
        assert same(found, expected) and 0 < calls < most
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_flipped_bit_is_noticed(
    run: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, same: Callable[..., bool]
) -> None:
    random, store, arguments = Random(0), store_in(tmp_path, checked=0), {"encoder": Plain(tmp_path / "calls")}
    expected, made = run(store, count=8, **arguments)
    whole = {path: path.read_bytes() for path in files_in(tmp_path / "store")}
    assert len(whole) == 32 <= made
    for path, contents in whole.items():
        bit = random.randrange(8 * len(contents))
        changed = bytearray(contents)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
    found, made = run(store, count=8, **arguments)
    assert same(found, expected) and made >= 32
    assert caplog.text.count("is damaged, it is made again") == 1
    assert {path: path.read_bytes() for path in files_in(tmp_path / "store")} == whole


#: Kills of a test, and a seed: some each time, 10,000 in the night.
@pytest.mark.parametrize(
    ("kills", "seed"), nightly_but({0}, [(examples(20), 0), *((1000, seed) for seed in range(1, 11))])
)
def test_kills_leave_nothing_wrong(
    run: Callable[..., Any], tmp_path: Path, same: Callable[..., bool], kills: int, seed: int
) -> None:
    expected, _ = run(None, count=8)
    random = Random(seed)
    began = time.monotonic()
    run(store_in(tmp_path), count=8)
    longest = 2 * (time.monotonic() - began)
    for kill in range(1, kills + 1):
        for path in files_in(tmp_path / "store"):
            if random.random() < 0.3:
                path.unlink()
        child = os.fork()
        if child == 0:
            run(store_in(tmp_path), count=8)
            os._exit(0)
        time.sleep(random.random() * longest)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if kill % 50 == 0 or kill == kills:
            assert same(run(store_in(tmp_path, checked=2), count=8)[0], expected)
