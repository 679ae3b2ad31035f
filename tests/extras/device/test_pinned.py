"""Laws of copies from workers' memory: registered once, held until the copy has ended, unregistered at the end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import SavableDataLoader, TaskEncoder
from energon_lite.extras.device.copies import DeviceCopy, DevicePrefetcher, Underway
from energon_lite.extras.device.pinned import PinnedSegments
from energon_lite.loading.executors.segments import SegmentReader, Segments, SegmentWriter
from energon_lite.loading.executors.transport import pack, send
from tests.extras.device.fake_device import FakeEngine, FakeMemory
from tests.testing import examples, received, train_loader

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no such memory")


@pytest.fixture(autouse=True)
def _torch_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, torch has no page-locked memory."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())


class Worker:
    """A worker and its trainer's end, in this process."""

    def __init__(self, count: int):
        segments = Segments(count)
        self.ours, self.theirs = multiprocessing.Pipe()
        self.reader, self.writer = SegmentReader(segments), SegmentWriter(segments)

    def batch(self, number: int, size: int) -> Any:
        self.writer.release(self.reader.take_released())
        batch = {"x": torch.full((size,), number), "y": [torch.full((9,), number)]}
        if not self.writer._free:  # a pipe to this very process would be full
            return batch
        send(self.theirs, pack(batch), self.writer)
        return received(self.ours, self.reader)

    def close(self) -> None:
        self.reader.close()
        self.ours.close()
        self.theirs.close()


def _check(batch: Any, number: int) -> None:
    assert bool((batch["x"] == number).all()) and bool((batch["y"][0] == number).all())


ACTIONS = st.one_of(
    st.tuples(st.just("batch"), st.integers(0, 1), st.integers(0, 1), st.integers(1, 4)),
    st.tuples(st.just("work"), st.integers(0, 1), st.integers(1, 5)),
    st.tuples(st.just("use"), st.integers(0, 5)),
    st.tuples(st.just("drop"), st.integers(0, 5)),
)


@settings(max_examples=examples(150))
@given(actions=st.lists(ACTIONS, max_size=60))
def test_no_segment_is_written_before_the_copies_from_it_have_ended(actions: list[tuple[Any, ...]]) -> None:
    """Two workers with two segments each, two streams, copies that happen at any time: every batch arrives whole."""
    memory, segments = FakeMemory(), PinnedSegments()
    engines = [FakeEngine(memory), FakeEngine(memory)]
    copies = [DeviceCopy("cuda:0", engine, segments) for engine in engines]
    workers = [Worker(2), Worker(2)]
    underway: list[tuple[int, int, Underway]] = []
    for number, action in enumerate(actions):
        match action:
            case "batch", worker, stream, megabytes:
                batch = workers[worker].batch(number, (megabytes << 17) - 1000)
                underway.append((number, stream, copies[stream].start(batch)))
                del batch
            case "work", stream, count:
                engines[stream].work(count)
            case "use", place if place < len(underway):
                arrived, stream, copy = underway.pop(place)
                _check(copies[stream].finish(copy), arrived)
            case "drop", place if place < len(underway):
                underway.pop(place)
    for worker in workers:
        worker.close()
    assert not memory.now and not segments.pinned, "all is unregistered, while it is still mapped"
    for arrived, stream, copy in underway:
        _check(copies[stream].finish(copy), arrived)


def test_a_batch_is_held_until_its_copy_has_ended_and_no_longer() -> None:
    engine, segments = FakeEngine(FakeMemory()), PinnedSegments()
    copy, worker = DeviceCopy("cuda:0", engine, segments), Worker(2)
    batch = worker.batch(1, 100_000)
    assert segments.place_of(batch["x"][::2], engine) is None  # its bytes are not beside each other
    alive = weakref.ref(batch["x"])
    copy.start(batch)
    del batch
    gc.collect()
    copy.start({"small": torch.zeros(2)})
    assert alive() is not None and worker.reader.take_released() == []
    engine.work(9)
    copy.start({"small": torch.zeros(2)})
    assert alive() is None and len(worker.reader.take_released()) == 1
    worker.close()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_batch_whose_hook_fails_is_held_too(error: type[BaseException]) -> None:
    engine = FakeEngine(FakeMemory())
    copy, worker = DeviceCopy("cuda:0", engine, PinnedSegments()), Worker(1)

    def fails(moved: Any) -> Any:
        raise error

    with pytest.raises(error):
        copy.start(worker.batch(1, 100_000), fails)
    gc.collect()
    assert worker.reader.take_released() == []
    engine.work(9)
    worker.close()


def test_memory_that_cannot_be_locked_is_copied_as_before(caplog: pytest.LogCaptureFixture) -> None:
    memory, segments = FakeMemory(refuses=True), PinnedSegments()
    copy, worker = DeviceCopy("cuda:0", FakeEngine(memory), segments), Worker(2)
    kept = [copy.start(worker.batch(number, 100_000)) for number in range(9)]
    for number, underway in enumerate(kept):
        _check(copy.finish(underway), number)
    worker.close()
    assert 1 <= memory.asked <= 2 and segments.refused == memory.asked, "not asked again for each batch"
    assert caplog.text.count("cannot be page-locked") == 1 and "operation not supported" in caplog.text


def test_other_memory_is_not_touched() -> None:
    memory = FakeMemory()
    copy = DeviceCopy("cuda:0", FakeEngine(memory), PinnedSegments())
    batch = {"x": torch.arange(100_000), "sparse": torch.eye(3).to_sparse(), "part": torch.ones(9, 9)[:, 2]}
    moved = copy.finish(copy.start({"x": batch["x"], "part": batch["part"]}))
    assert torch.equal(moved["x"], batch["x"]) and torch.equal(moved["part"], batch["part"]) and not memory.asked
    assert PinnedSegments().place_of(batch["sparse"], FakeEngine(memory)) is None


def test_a_forked_process_leaves_the_device_alone() -> None:
    engine = FakeEngine(FakeMemory())
    copy, worker = DeviceCopy("cuda:0", engine, PinnedSegments()), Worker(1)
    copy.finish(copy.start(worker.batch(1, 100_000)))
    child = os.fork()
    if not child:
        worker.reader.close()
        os._exit(engine.memory.count("unregister"))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    worker.close()
    assert engine.memory.count("unregister") == 1


class Wide(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        return {"x": torch.full((30_000,), int(sample.text[2:])), "number": int(sample.text[2:])}


@pytest.fixture
def loading(leaf_of: Any) -> Iterator[tuple[SavableDataLoader, FakeMemory, PinnedSegments]]:
    memory, segments = FakeMemory(), PinnedSegments()
    with train_loader(leaf_of(30), 2, batch_size=4, task_encoder=Wide()) as loader:
        loader._path = DevicePrefetcher(DeviceCopy("cuda:0", FakeEngine(memory), segments), loader._path)
        yield loader, memory, segments


def test_a_run_registers_the_segments_of_its_workers_once(
    loading: tuple[SavableDataLoader, FakeMemory, PinnedSegments],
) -> None:
    loader, memory, segments = loading
    for _, batch in zip(range(60), loader, strict=False):
        assert batch["x"].shape == (4, 30_000)
        assert torch.equal(batch["x"][:, 0], batch["x"][:, -1])
        assert batch["x"][:, 7].tolist() == list(batch["number"])
    # How many segments two workers fill depends on time; each is registered at its first use, and stays so.
    assert 2 <= len({address for _, address, _ in memory.log}) == memory.count("register") <= 12
    assert not memory.count("unregister")
    assert loader.stats()["unpinned_segments"] == 0
    loader.close()
    assert not memory.now and not segments.pinned and memory.count("unregister") == memory.count("register")
    assert next(iter(loader))["x"].shape == (4, 30_000)


def test_a_worker_that_died_has_nothing_left(loading: tuple[SavableDataLoader, FakeMemory, PinnedSegments]) -> None:
    loader, memory, _ = loading
    batches = iter(loader)
    for _ in range(10):
        next(batches)
    for worker in list(loader._workers.executor()._workers):  # type: ignore[attr-defined]
        worker.process.kill()
    for _ in range(20):
        batch = next(batches)
        assert batch["x"][:, 7].tolist() == list(batch["number"])
    assert memory.count("unregister") >= 2
