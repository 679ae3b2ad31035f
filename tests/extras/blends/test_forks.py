"""Work shared with forked processes: whatever happens to them, all of it is done, in order, and none of them stays."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.extras.blends import forks
from energon_lite.extras.blends.forks import done_by_forks
from tests.testing import examples, until


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    others = {*multiprocessing.active_children()}  # that earlier tests have left
    yield
    assert {*multiprocessing.active_children()} <= others


@settings(max_examples=examples(25))
@given(st.integers(0, 40), st.integers(1, 5))
def test_all_of_it_in_order(count: int, processes: int) -> None:
    told: list[int] = []
    found = done_by_forks(lambda number: (number, "x" * 50_000), count, processes, told.append)
    assert [number for number, _ in found] == list(range(count))
    assert told == sorted(told) and len(told) == len(range(0, count, processes))


def test_others_work_too() -> None:
    meeting = multiprocessing.get_context("fork").Barrier(4)
    began: set[int] = set()

    def work(number: int) -> int:
        if os.getpid() not in began:  # the first piece of each process waits for the other processes
            began.add(os.getpid())
            meeting.wait(timeout=120)
        return os.getpid()

    assert len(set(done_by_forks(work, 20, 4))) == 4
    assert not meeting.broken


WRONG: dict[str, Callable[[int], Any]] = {
    "dies": lambda number: os._exit(1),
    "fails": lambda number: 1 // 0,
    "hangs": lambda number: time.sleep(100),
    "cannot be sent": lambda number: lambda: number,
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("first", [0, 5])
def test_what_goes_wrong_there_is_done_here(monkeypatch: pytest.MonkeyPatch, wrong: str, first: int) -> None:
    monkeypatch.setattr(forks, "_PATIENCE", 0.2)
    parent = os.getpid()

    def work(number: int) -> int:
        return WRONG[wrong](number) if os.getpid() != parent and number >= first else number

    assert done_by_forks(work, 20, 3) == list(range(20))


@pytest.mark.parametrize("allowed", [0, 1])
def test_fewer_processes_than_asked_for(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    fork, forked = os.fork, []

    def limited() -> int:
        if len(forked) == allowed:
            raise BlockingIOError("no more processes")
        forked.append(1)
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    assert done_by_forks(lambda number: number, 20, 4) == list(range(20))


@pytest.mark.parametrize("number", [0, 1, 2, 19])
def test_an_error_is_raised_here(number: int) -> None:
    def work(one: int) -> None:
        if one == number:
            raise KeyError(number)

    with pytest.raises(KeyError, match=str(number)):
        done_by_forks(work, 20, 3)


def test_an_interrupt_leaves_nobody() -> None:
    parent = os.getpid()

    def work(number: int) -> None:
        if os.getpid() == parent:
            raise KeyboardInterrupt
        time.sleep(100)

    with pytest.raises(KeyboardInterrupt):
        done_by_forks(work, 20, 3)


def test_nobody_stays_when_the_one_that_waits_is_killed(tmp_path: Path) -> None:
    def work(number: int) -> bytes:
        if number % 3 == 0:
            time.sleep(100)
        (tmp_path / str(os.getpid())).touch()
        return bytes(1_000_000)

    waits = multiprocessing.get_context("fork").Process(target=done_by_forks, args=(work, 30, 3))
    waits.start()
    try:
        assert until(lambda: len(list(tmp_path.iterdir())) == 2, 80)
    finally:
        waits.kill()
        waits.join()
    forked = [Path("/proc", path.name) for path in tmp_path.iterdir()]
    assert until(lambda: not any(map(runs, forked)), 80)


def runs(process: Path) -> bool:
    try:
        return "(zombie)" not in (process / "status").read_text()
    except OSError:
        return False
