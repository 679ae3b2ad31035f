"""A user's hooks stay on the fast route: one read for all samples of a job, and few calls for each of them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import energon_lite
from energon_lite import TaskEncoder, get_savable_loader, get_train_dataset
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.storage.read.sample_reader import SampleReader
from tests.testing import ALONE

PACKAGE = str(Path(energon_lite.__file__).parent)


class Encodes(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        return sample

    def batch(self, samples: list[Any]) -> Any:
        return samples


class Batches(TaskEncoder):
    def batch(self, samples: list[Any]) -> Any:
        return samples


def _loader(path: Any, encoder: TaskEncoder, **arguments: Any) -> Any:
    return get_savable_loader(get_train_dataset(path, task_encoder=encoder, worker_config=ALONE, **arguments))


@pytest.mark.parametrize("windows", [(None, None), (40, 10), None])
@pytest.mark.parametrize("encoder", [Encodes(), Batches()])
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
    loader = _loader(leaf_of(50), encoder, batch_size=8, shuffle_buffer_size=shuffle, max_samples_per_sequence=runs)
    for _, batch in zip(range(5), loader, strict=False):
        assert [sample.text for sample in batch] == [sample.__key__ for sample in batch]
    assert reads == [8] * 5


@pytest.mark.parametrize("encoder", [Encodes(), Batches()])
def test_one_that_is_broken_has_no_other_decoded_twice(
    leaf_of: Any, monkeypatch: pytest.MonkeyPatch, encoder: TaskEncoder
) -> None:
    loader = _loader(leaf_of(8), encoder, batch_size=8)
    fields = loader.dataset.leaves[0].fields
    ((part, (_, named)),) = fields.steps.items()
    seen = list[bytes]()

    def decode(data: bytes) -> str:
        seen.append(data)
        if len(seen) == 3:
            raise ValueError("broken")
        return data.decode()

    fields.steps[part] = decode, named
    assert len(next(iter(loader))) == 8
    assert len(seen) == 8  # the sample loader makes the one that was broken


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
