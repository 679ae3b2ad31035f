"""Threads that share a loader: one at a time, in any turn; two at once get an error, and no batch is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import TaskEncoder, stateless
from energon_lite.errors import FatalSampleError, UsageError
from tests.testing import examples, take, train_loader, val_loader

Leaf = Callable[..., Path]
KINDS = [(0, "fork"), (2, "thread"), (2, "fork")]


def loader_of(leaf: Path, workers: int = 0, start_method: Any = "fork", **more: Any) -> Any:
    return train_loader(leaf, workers, batch_size=1, start_method=start_method, **more)


def keys(batches: Any, count: int) -> list[str]:
    return [batch.__key__[0] for batch in take(batches, count)]


def at_once(count: int, body: Callable[[], list[str]]) -> tuple[list[str], list[Exception]]:
    """What ``body`` gives in so many threads, and what they die of."""
    found: list[str] = []
    errors: list[Exception] = []
    start = threading.Barrier(count)

    def run() -> None:
        start.wait(120)
        try:
            found.extend(body())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    return found, errors


@pytest.mark.parametrize(("workers", "start_method"), KINDS)
@pytest.mark.parametrize("shared", [False, True], ids=["loops", "iterator"])
def test_threads_at_once_get_an_error_and_none_loses_a_batch(
    leaf_of: Leaf, workers: int, start_method: str, shared: bool
) -> None:
    expected = keys(loader_of(leaf_of(400)), 400)
    with loader_of(leaf_of(400), workers, start_method) as loader:
        batches = iter(loader)

        def body() -> list[str]:
            got = []
            for _ in range(40):
                try:
                    got.append(next(batches if shared else iter(loader)).__key__[0])
                except UsageError as error:
                    assert "another thread" in str(error) and "fix:" in str(error)
                    refused.append(error)
            return got

        refused: list[Exception] = []
        found, errors = at_once(8, body)
        assert errors == []
        assert refused, "eight threads never met"
        assert sorted(found) == sorted(expected[: len(found)])
        assert loader.save_state_rank()["position"] == len(found)
        assert keys(loader, 5) == expected[len(found) : len(found) + 5]


@pytest.mark.parametrize(("workers", "start_method"), KINDS)
def test_threads_with_a_lock_share_an_epoch(leaf_of: Leaf, workers: int, start_method: str) -> None:
    """What the error advises."""
    with val_loader(leaf_of(60), workers, batch_size=1, start_method=start_method) as loader:
        lock, batches = threading.Lock(), iter(loader)

        def one() -> Any:
            with lock:
                return next(batches, None)

        found, errors = at_once(8, lambda: [batch.__key__[0] for batch in iter(one, None)])
        assert errors == [] and sorted(found) == sorted(f"a-{number}" for number in range(60))


@settings(max_examples=examples(65))
@given(turns=st.lists(st.integers(0, 3), max_size=20), workers=st.sampled_from([0, 0, 0, 2]))
def test_threads_in_turn_go_on_where_the_one_before_was(leaf_of: Leaf, turns: list[int], workers: int) -> None:
    """As when a prefetcher's thread ends, and another one takes over. Workers outlive the thread that started them."""
    expected = keys(loader_of(leaf_of(400)), 100)
    with loader_of(leaf_of(400), workers) as loader:
        batches: Iterator[Any] = iter(loader)
        got: list[str] = []
        for turn in turns:
            found, errors = at_once(1, lambda turn=turn: keys(batches if turn % 2 else loader, turn))  # type: ignore[misc]
            got += found
            assert errors == []
        assert got == expected[: len(got)] and loader.stats()["worker_deaths"] == 0


class Fails(TaskEncoder):
    """Fails as long as it is told to."""

    fails = True

    @stateless
    def encode_sample(self, sample: Any) -> Any:
        if Fails.fails:
            raise FatalSampleError("not now")
        return sample


def test_a_thread_takes_over_from_one_that_failed(leaf_of: Leaf, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_of(leaf_of(50), task_encoder=Fails())
    batches = iter(loader)
    _, errors = at_once(1, lambda: keys(batches, 1))
    assert "not now" in str(errors)
    assert next(batches, None) is None  # as a generator that has raised
    monkeypatch.setattr(Fails, "fails", False)
    assert keys(loader, 3) == keys(loader_of(leaf_of(50)), 3)


@pytest.mark.parametrize(("workers", "start_method"), KINDS)
def test_who_only_looks_disturbs_nobody(leaf_of: Leaf, workers: int, start_method: str) -> None:
    """Threads that ask for numbers and states all the time, as one that watches a run does."""
    expected = keys(loader_of(leaf_of(400)), 300)
    done = threading.Event()
    with loader_of(leaf_of(400), workers, start_method) as loader:

        def take() -> list[str]:
            try:
                return keys(loader, 300)
            finally:
                done.set()

        def look() -> list[str]:
            while not done.is_set():
                loader.stats()
                loader.save_state_rank()
            return []

        bodies = iter([look, take, look])
        found, errors = at_once(3, lambda: next(bodies)())
        assert errors == [] and found == expected
        assert loader.stats()["batches"] == 300


class Noted(list[str]):
    """Texts of a batch. The thread ``looks`` waits where it takes them from a worker's answer."""

    opened, taken = threading.Event(), threading.Event()

    def __reduce__(self) -> Any:
        return Noted.of, (list(self),)

    @staticmethod
    def of(texts: list[str]) -> Noted:
        if threading.current_thread().name == "looks" and not Noted.opened.is_set():
            Noted.opened.set()
            Noted.taken.wait(0.5)  # for what must not happen
        return Noted(texts)


class Notes(TaskEncoder):
    @stateless
    def encode_batch(self, batch: Any) -> Any:
        return replace(batch, text=Noted(batch.text))


def test_no_batch_is_taken_while_another_thread_takes_answers_of_workers(leaf_of: Leaf) -> None:
    """``stats()`` takes answers that have come, and a thread that asks for a batch meanwhile waits until it is done."""
    expected = keys(loader_of(leaf_of(40)), 20)
    with loader_of(leaf_of(40), 1, task_encoder=Notes()) as loader:
        batches = iter(loader)
        found = keys(batches, 1)

        def look() -> None:
            while not Noted.opened.is_set():
                loader.stats()

        looks = threading.Thread(target=look, name="looks")
        looks.start()
        assert Noted.opened.wait(120)

        def take() -> list[str]:
            try:
                return keys(batches, 19)
            finally:
                Noted.taken.set()

        more, errors = at_once(1, take)
        looks.join(120)
        assert not looks.is_alive() and errors == [] and found + more == expected
