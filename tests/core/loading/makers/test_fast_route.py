"""A user's hooks stay on the fast route: one read for all samples of a job, few calls for each of them, and requests of
a chunk together; what fails there is counted and logged once, and made by the reporting route."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import energon_lite
from energon_lite import ReadAhead, TaskEncoder, TextSample
from energon_lite.extras.remote import read_ahead
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.storage.files.shard_store import ShardStore
from energon_lite.storage.read.sample_reader import SampleReader
from tests.testing import Listed, take, train_loader

PACKAGE = str(Path(energon_lite.__file__).parent)


class Encodes(Listed):
    def encode_sample(self, sample: Any) -> Any:
        return sample


def _loader(path: Any, encoder: TaskEncoder | None, **arguments: Any) -> Any:
    return train_loader(path, task_encoder=encoder, **{"batch_size": 8, **arguments})


@pytest.mark.parametrize("windows", [(None, None), (40, 10), None])
@pytest.mark.parametrize("encoder", [Encodes(), Listed()])
def test_samples_of_a_job_are_read_together(
    leaf_of: Any, monkeypatch: pytest.MonkeyPatch, encoder: TaskEncoder, windows: Any
) -> None:
    """Also where code of the user's makes samples (no windows), which takes a loader of samples."""
    reads = list[int]()
    read = SampleReader.read

    def counting(self: Any, indices: Any) -> Any:
        reads.append(len(indices))
        return read(self, indices)

    def alone(*_: Any) -> Any:
        raise AssertionError("a sample was read by itself")

    monkeypatch.setattr(SampleReader, "read", counting)
    if windows:
        monkeypatch.setattr(SampleReader, "sample", alone)
    else:
        monkeypatch.setattr(Leaf, "fields", None)
    shuffle, runs = windows or (None, None)
    loader = _loader(leaf_of(50), encoder, shuffle_buffer_size=shuffle, max_samples_per_sequence=runs)
    for batch in take(loader, 5):
        assert [sample.text for sample in batch] == [sample.__key__ for sample in batch]
    assert reads == [8] * 5
    assert loader.stats()["fallbacks"] == loader.gather_stats()["fallbacks"] == {}


@pytest.mark.parametrize("encoder", [Encodes(), Listed()])
def test_one_that_is_broken_has_no_other_decoded_twice(leaf_of: Any, encoder: TaskEncoder) -> None:
    seen = list[bytes]()

    def decode(data: bytes) -> str:
        seen.append(data)
        if len(seen) == 3:
            raise ValueError("broken")
        return data.decode()

    loader = _loader(leaf_of(8), encoder)
    _decode_by(loader, decode)
    assert len(next(iter(loader))) == 8
    assert len(seen) == 8  # the sample loader makes the one that was broken


@pytest.mark.parametrize("sees_samples", [False, True])
def test_an_observer_of_samples_is_told_of_each(leaf_of: Any, sees_samples: bool) -> None:
    steps: list[tuple[str, str, str]] = []
    observer = SimpleNamespace(sees_samples=sees_samples, begin=steps.clear, step=lambda *of: steps.append(of), end=len)
    loader = _loader(leaf_of(50), None)
    loader._workers._request.runner.services.observers = (observer,)
    (batch,) = take(loader, 1)
    told = {key for stage, _, key in steps if stage == "decode"}
    assert told == (set(batch.__key__) if sees_samples else set())


def _calls(loader: Any) -> Counter[str]:
    """Python calls in the package for one ``next()``, by file: the fewest of several."""
    np.random.seed(0)  # without the half of a pair of normal numbers, which a loader would keep for its caller
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    found = []
    for _ in range(20):
        calls: Counter[str] = Counter()

        def count(frame: FrameType, event: str, _: Any, calls: Counter[str] = calls) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
                calls[frame.f_code.co_filename.removeprefix(PACKAGE)] += 1

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            next(batches)
        finally:
            sys.setprofile(before)
        found.append(calls)
    return min(found, key=Counter.total)


def _makers(calls: Counter[str]) -> int:
    """Those of them that make the batch, beside reading and planning."""
    return sum(count for file, count in calls.items() if file.startswith(("/loading/makers", "/hooks")))


def test_calls_of_a_batch_of_two(leaf_of: Any) -> None:
    arguments = {"shuffle_buffer_size": 40, "max_samples_per_sequence": 10}
    two = _calls(_loader(leaf_of(50), Encodes(), batch_size=2, **arguments))
    four = _calls(_loader(leaf_of(50), Encodes(), batch_size=4, **arguments))
    assert _makers(two) <= 52
    assert (_makers(four) - _makers(two)) / 2 <= 4  # for each sample more


def _broken(*_: Any) -> Any:
    raise ValueError("broken fast route")


def _decode_by(loader: Any, decode: Callable[[bytes], Any]) -> Any:
    """Have another function decode the only part of samples, on the fast route; the fields."""
    fields = loader.dataset.leaves[0].fields
    ((part, (_, named)),) = fields.steps.items()
    fields.steps[part] = decode, named
    return fields


@pytest.mark.parametrize("way", ["main", "fork", "thread"])
def test_each_reason_is_counted_and_logged_once(
    leaf_of: Any, way: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(SampleReader, "read", _broken)
    with _loader(leaf_of(24), Listed(), num_workers=2, start_method=way) as loader:
        for batch in take(loader, 3):
            assert [sample.text for sample in batch] == [sample.__key__ for sample in batch]
        stats = loader.stats()
    assert stats["failed"] == 0 and stats["fallbacks"].keys() == {"read_together: ValueError"}
    assert stats["fallbacks"]["read_together: ValueError"] >= 3  # at least one for each delivered batch
    (record,) = [record for record in caplog.records if "fast route" in record.message]
    assert "broken fast route" in record.message and loader.dataset.leaves[0].name in record.message


@pytest.mark.parametrize(("encoder", "batches"), [(None, {"collate: ValueError": 1}), (Listed(), {})])
def test_an_error_in_fields_of_a_batch_or_in_single_samples(
    leaf_of: Any, encoder: Any, batches: dict[str, int]
) -> None:
    with _loader(leaf_of(24), encoder) as loader:
        _decode_by(loader, _broken)
        batch = next(iter(loader))
        assert len(batch.__key__ if encoder is None else batch) == 8
        assert loader.stats()["fallbacks"] == batches | {"decode: ValueError": 8}


class Twice(TaskEncoder):
    """Each sample comes twice, so that only the hooks know how many there are."""

    def encode_sample(self, sample: TextSample) -> Iterator[TextSample]:
        yield sample
        yield sample


def keys(data: Path, batches: int, **options: Any) -> list[tuple[str, ...]]:
    with train_loader(data, batch_size=7, task_encoder=Twice(), **options) as loader:
        return [tuple(batch.__key__) for batch in take(loader, batches)]


def test_requests_of_a_chunk_are_made_at_the_same_time(
    leaf_of: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = keys(leaf_of(200), 12)
    read, changed = ShardStore.read, threading.Condition()
    now = most = 0

    def watched(self: ShardStore, *arguments: Any) -> bytes:
        """Read once five requests are open, after a sixth has had the time to come."""
        nonlocal now, most
        with changed:
            now, first = now + 1, most < 5
            most = max(most, now)
            changed.notify_all()
            changed.wait_for(lambda: most >= 5, timeout=1)
            if first:
                changed.wait_for(lambda: most > 5, timeout=0.05)
        try:
            return read(self, *arguments)
        finally:
            with changed:
                now -= 1

    monkeypatch.setattr(ShardStore, "read", watched)
    monkeypatch.setattr(read_ahead, "_shared", {})
    assert keys(leaf_of(200), 12, read_ahead=ReadAhead(requests=5)) == expected
    assert most == 5
