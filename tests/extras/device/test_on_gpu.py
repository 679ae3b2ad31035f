"""Copies from workers' memory to a GPU, and the hook there: what only a GPU can refute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from energon_lite import SavableDataLoader, TaskEncoder, get_savable_loader, get_train_dataset
from energon_lite.extras.device.copies import DeviceCopy, DevicePrefetcher
from energon_lite.extras.device.pinned import SEGMENTS, CudaEngine
from tests.testing import alone, take

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; pytest -m gpu"),
]

#: Floats of a sample; four samples are a batch of 64 MB.
LENGTH = 4 << 20


class Wide(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        number = int(sample.text[2:])
        return {"x": torch.full((LENGTH,), float(number)), "number": number}


class Drawn(Wide):
    def encode_on_device(self, batch: Any) -> Any:
        assert batch["x"].is_cuda and torch.cuda.current_stream() != torch.cuda.default_stream()
        return {"number": list(batch["number"]), "noise": torch.rand(3, device="cuda") + batch["x"][0, 0]}


@pytest.fixture
def loader(leaf_of: Any) -> Iterator[SavableDataLoader]:
    dataset = get_train_dataset(leaf_of(30), batch_size=4, task_encoder=Wide(), worker_config=alone(2))
    with get_savable_loader(dataset).to("cuda") as made:
        yield made


def _whole(batch: Any) -> torch.Tensor:
    numbers = torch.tensor([float(number) for number in batch["number"]], device="cuda")
    return (batch["x"] == numbers[:, None]).all()


def _allocations() -> int:
    if not hasattr(torch.cuda, "host_memory_stats"):
        pytest.skip("this torch does not count allocations of page-locked memory")
    return int(torch.cuda.host_memory_stats()["num_host_alloc"])


def test_nothing_is_allocated_or_registered_after_the_start(loader: SavableDataLoader) -> None:
    batches = iter(loader)
    for _ in range(30):
        next(batches)
    before = _allocations(), dict(SEGMENTS.pinned)
    for _ in range(30):
        next(batches)
    assert (_allocations(), dict(SEGMENTS.pinned)) == before
    assert all(SEGMENTS.pinned.values()) and len(SEGMENTS.pinned) >= 2
    assert loader.stats()["unpinned_segments"] == 0
    loader.close()
    assert not SEGMENTS.pinned


def test_the_trainer_spends_less_than_a_millisecond_on_a_batch(loader: SavableDataLoader) -> None:
    path = loader._path
    assert isinstance(path, DevicePrefetcher)
    seconds: list[float] = []
    start = path.copy.start

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        made = start(*arguments)
        seconds.append(time.perf_counter() - began)
        return made

    path.copy.start = timed  # type: ignore[method-assign]
    batches = iter(loader)
    for _ in range(40):
        assert next(batches)["x"].nbytes == 64 << 20
    assert statistics.median(seconds[20:]) < 1e-3


def test_batches_are_whole_while_the_device_and_the_workers_are_busy(loader: SavableDataLoader) -> None:
    busy = torch.randn(4096, 4096, device="cuda")
    checks = []
    for _, batch in zip(range(60), loader, strict=False):
        for _ in range(5):
            busy = busy @ busy * 1e-4
        checks.append(_whole(batch))
        del batch
    assert bool(torch.stack(checks).all())


def test_copies_of_other_memory_are_right_while_the_device_is_busy() -> None:
    copy = DeviceCopy("cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    for number in range(20):
        underway = copy.start({"x": torch.full((1 << 20,), float(number)), "y": [torch.tensor(number)]})
        busy = busy @ busy * 1e-4
        moved = copy.finish(underway)
        assert moved["x"].is_cuda and moved["x"].eq(number).all()
        assert moved["y"][0].item() == number


def test_two_streams_copy_from_the_same_workers(loader: SavableDataLoader) -> None:
    path = loader._path
    assert isinstance(path, DevicePrefetcher)
    copies = [path.copy, DeviceCopy("cuda")]
    before = path._before
    kept = []
    for number in range(40):
        if (result := before.take()) is None:
            break
        loader._dataset_iterator.advance()
        kept.append((copies[number % 2], copies[number % 2].start(result.batch)))
        del result
        if len(kept) > 3:
            copy, underway = kept.pop(0)
            assert _whole(copy.finish(underway))
    assert all(_whole(copy.finish(underway)) for copy, underway in kept)


def test_a_refused_registration_leaves_no_error_behind() -> None:
    engine = CudaEngine(torch.device("cuda", torch.cuda.current_device()))
    memory = torch.empty(1 << 22, dtype=torch.uint8)
    engine.register(memory.data_ptr(), memory.nbytes)
    try:
        with pytest.raises(RuntimeError):
            engine.register(memory.data_ptr(), memory.nbytes)
        assert float((torch.ones(9, device="cuda") * 2).sum()) == 18.0
    finally:
        engine.unregister(memory.data_ptr())


def test_the_hook_runs_on_the_stream_of_the_copy_with_the_numbers_of_its_batch(leaf_of: Any) -> None:
    found = []
    for workers in (0, 2):
        dataset = get_train_dataset(leaf_of(30), batch_size=4, task_encoder=Drawn(), worker_config=alone(workers))
        torch.manual_seed(workers)
        before = torch.cuda.get_rng_state()
        with get_savable_loader(dataset).to("cuda") as loader:
            found.append([(batch["number"], batch["noise"].tolist()) for batch in take(loader, 8)])
        assert torch.equal(torch.cuda.get_rng_state(), before)
    assert found[0] == found[1] and len({str(noise) for _, noise in found[0]}) == 8
