"""What a loader can say about itself: numbers, which jobs are timed and what they say, and reports of what was lost."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
import timeit
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import BestFit, Capacity, SkipSample, TaskEncoder, pack_sequences
from energon_lite.batching import TokenSequence
from energon_lite.batching.collate import tokens_of
from energon_lite.loading.executors.executor import STAGES, WorkSeconds
from energon_lite.loading.makers import observers
from energon_lite.loading.makers.observers import JobTimer, Times
from energon_lite.loading.makers.outcomes import Failure
from energon_lite.loading.makers.report import Report
from energon_lite.storage.files.shard_store import COUNTS, Reads
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.testing import blend_of, take, train_loader, val_loader

_loader = partial(train_loader, batch_size=4)
#: Workers, and how they are started.
WAYS: list[tuple[int, Any]] = [(0, "main"), (1, "fork"), (1, "thread")]


def _blend(leaf_of: Any, **weights: float) -> dict[str, Any]:
    return blend_of((leaf_of(30, tag), weight) for tag, weight in weights.items())


class Picky(TaskEncoder):
    """Skips every third sample of b, fails on every fifth one of a, and sees each one."""

    def encode_sample(self, sample: Any) -> Any:
        number = int(sample.text[2:])
        if sample.text[0] == "b" and number % 3 == 0:
            raise SkipSample("a multiple of three")
        if sample.text[0] == "a" and number % 5 == 0:
            raise ValueError("a multiple of five")
        return sample


class Packs(Picky):
    """Packs pairs of those samples."""

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[at : at + 2] for at in range(0, len(samples) - 1, 2)]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return {"texts": [sample.text for sample in samples]}


class CopiedPacks(Packs):
    """Its selection makes copies of the samples."""

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return super().select_samples_to_pack([replace(sample) for sample in samples])


def _by_leaf(stats: dict[str, Any], kind: str) -> dict[str, int]:
    return {one["dataset"][0]: one[kind] for one in stats["datasets"]}


@pytest.mark.parametrize(("workers", "method"), WAYS)
def test_counts_by_data_set(leaf_of: Any, workers: int, method: Any) -> None:
    with _loader(_blend(leaf_of, a=0.7, b=0.3), workers, task_encoder=Picky(), start_method=method) as loader:
        texts = [text for batch in take(loader, 40) for text in batch.text]
        stats = loader.stats()
    assert _by_leaf(stats, "samples") == Counter(text[0] for text in texts)
    assert stats["samples"] == len(texts) == 160 and stats["batches"] == 40
    reasons = Counter({(one["dataset"][0], one["skipped"]): one["count"] for one in stats["reasons"]})
    assert _by_leaf(stats, "skipped") == {"a": 0, "b": reasons["b", True]} and stats["skipped"] > 5
    assert _by_leaf(stats, "failed") == {"a": reasons["a", False], "b": 0} and stats["failed"] > 5
    assert {one["path"] for one in stats["datasets"]} == {str(leaf_of(30, tag)) for tag in "ab"}


@pytest.mark.parametrize("encoder", [Packs(), CopiedPacks()])
@pytest.mark.parametrize(("workers", "method"), WAYS[:2])
def test_counts_by_data_set_of_packed_samples(leaf_of: Any, workers: int, method: Any, encoder: Any) -> None:
    packing: Any = {"batch_size": 1, "packing_buffer_size": 5, "task_encoder": encoder}
    with _loader(_blend(leaf_of, a=0.5, b=0.5), workers, start_method=method, **packing) as loader:
        texts = [text for batch in take(loader, 40) for text in batch["texts"][0]]
        stats = loader.stats()
    assert _by_leaf(stats, "samples") == Counter(text[0] for text in texts)
    assert sum(_by_leaf(stats, "dropped").values()) == stats["dropped"] > 10
    assert stats["skipped"] == _by_leaf(stats, "skipped")["b"] > 3
    assert stats["failed"] == _by_leaf(stats, "failed")["a"] > 3


class CutPacks(TaskEncoder):
    """Its selection cuts each sample into three pieces, in two packs."""

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [pack for one in samples for pack in ([replace(one), one], [replace(one)])]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return {"texts": [sample.text for sample in samples]}


def test_a_sample_that_is_cut_into_packs_counts_once(leaf_of: Any) -> None:
    with val_loader(leaf_of(10), batch_size=1, packing_buffer_size=5, task_encoder=CutPacks()) as loader:
        batches = list(loader)
        assert (len(batches), loader.stats()["samples"]) == (20, 10)
    with val_loader(leaf_of(10), batch_size=1, packing_buffer_size=5, task_encoder=CutPacks()) as loader:
        half = take(loader, 3)
        state = loader.save_state_rank()
    with val_loader(leaf_of(10), batch_size=1, packing_buffer_size=5, task_encoder=CutPacks()) as loader:
        loader.restore_state_rank(state)
        assert half + list(loader) == batches
        assert loader.stats()["samples"] == 8  # the second pack of a sample that was counted with its first


def test_the_default_hooks_count_alike(leaf_of: Any) -> None:
    """Whole batches by columns, too."""
    with _loader(_blend(leaf_of, a=0.5, b=0.5)) as loader:
        texts = [text for batch in take(loader, 20) for text in batch.text]
        assert _by_leaf(loader.stats(), "samples") == Counter(text[0] for text in texts)


def test_a_batch_that_fails_is_charged_to_its_samples(leaf_of: Any) -> None:
    class Uneven(TaskEncoder):
        def batch(self, samples: list[Any]) -> Any:
            if sum(int(sample.text[2:]) for sample in samples) % 4 == 0:
                raise ValueError("divisible by four")
            return super().batch(samples)

    with _loader(_blend(leaf_of, a=0.75, b=0.25), task_encoder=Uneven(), batch_size=2) as loader:
        take(loader, 40)
        stats = loader.stats()
    failed = _by_leaf(stats, "failed")
    assert stats["failed"] == failed["a"] + failed["b"] and stats["failed"] % 2 == 0
    assert failed["a"] > failed["b"] > 0


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"num_tokens": 3}, 3),
        ({"num_tokens": torch.tensor([3, 4])}, 7),
        ({"num_tokens": [3, 4]}, 7),
        ({"num_tokens": np.int64(5)}, 5),
        ({"num_tokens": "many"}, 0),
        ({}, 0),
        (None, 0),
        ([1, 2], 0),
    ],
)
def test_tokens_of_a_batch(batch: Any, tokens: int) -> None:
    assert tokens_of(batch) == tokens


@pytest.mark.parametrize("says_tokens", [True, False])
def test_tokens_of_planned_batches(leaf_of: Any, says_tokens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sequences(TaskEncoder):
        def encode_sample(self, sample: Any) -> TokenSequence:
            index = sample.__restore_key__[2]
            if index == 7:
                raise SkipSample("seven")
            tokens = torch.arange(1 + index % 5)
            return TokenSequence.derive_from(sample, tokens=tokens, labels=tokens)

        def batch(self, samples: list[Any]) -> Any:
            packed = pack_sequences(samples, pad=-1)
            return packed if says_tokens else {"count": packed.num_tokens}

    lengths = np.array([1 + index % 5 for index in range(30)])
    monkeypatch.setattr(WebdatasetSource, "column", lambda *_: lengths)
    with train_loader(leaf_of(30, "a"), batching=BestFit(Capacity(16)), task_encoder=Sequences()) as loader:
        batches = take(loader, 10)
        found = sum(batch.num_tokens if says_tokens else batch["count"] for batch in batches)
        assert loader.stats()["tokens"] == found > 100 and loader.stats()["skipped"] > 0


def test_waiting_is_measured(leaf_of: Any) -> None:
    class Slow(TaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            time.sleep(0.005)
            return sample

    with _loader(leaf_of(30, "a"), task_encoder=Slow()) as loader:
        began = time.monotonic()
        for _ in zip(range(5), loader, strict=False):
            time.sleep(0.05)  # the trainer's own time does not count
        elapsed = time.monotonic() - began
        assert 5 * 4 * 0.005 <= loader.stats()["wait_seconds"] <= elapsed - 5 * 0.05


def test_deaths_survive_the_close(leaf_of: Any) -> None:
    loader = _loader(leaf_of(30, "a"), 1)
    take(loader, 1)
    COUNTS.bytes_read += 1 << 50  # by another loader in this process, from which new workers are forked
    for _ in range(2):
        os.kill(loader._workers.executor()._workers[0].process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        take(loader, 5)
        loader.close()
        take(loader, 1)
    loader.close()
    COUNTS.take()
    assert loader.stats()["worker_deaths"] == 2 and loader.stats()["bytes_read"] < 1 << 50


@pytest.mark.parametrize(("workers", "method"), [(0, "main"), (2, "thread"), (2, "fork")])
def test_bytes_are_those_that_the_loaders_own_jobs_have_read(
    leaf_of: Any, workers: int, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobTimer, "due", property(lambda self: math.inf, lambda self, due: None), raising=False)
    with _loader(leaf_of(30)) as other, _loader(leaf_of(30), workers, start_method=method) as loader:
        take(other, 5)  # in this process, before the loader has any workers
        assert loader.stats()["bytes_read"] == 0
        texts = [text for batch in take(loader, 10) for text in batch.text]
        if method == "fork":
            take(other, 1000)  # no workers of the loader
        loader.close()
        read = loader.stats()["bytes_read"]
    delivered = sum(len(text.encode()) for text in texts)
    least, most = {"main": (1, 1), "thread": (1, 50), "fork": (0, 50)}[method]  # processes only report timed jobs
    assert least * delivered <= read <= most * delivered


def test_many_skips_are_a_filter_which_is_said_once_and_few_are_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    report, few, skip = Report(100), Report(100), Failure("leaf", "key", "encode_sample", "too long", skipped=True)
    for step in range(2000):
        few.add([skip if step % 10 == 9 else None])
    assert "filter" not in caplog.text and few.skipped == 200
    for step in range(2000):
        report.add([skip if step % 5 == 0 else None])
        assert ("this is a filter" in caplog.text) == (step >= 1000)  # the first skip after so many samples
    assert caplog.text.count("this is a filter") == 1
    assert "energon-lite measure PATH --task-encoder" in caplog.text and "use_measured_skips=True" in caplog.text


def test_reasons_that_differ_in_numbers_and_keys_are_one(caplog: pytest.LogCaptureFixture) -> None:
    report = Report(0)
    for number in range(185):
        reason = f"ValueError: {number} tokens of 'sample{number}' are no text"
        report.add([Failure("leaf", f"sample{number}", "encode_sample", reason, skipped=False)])
    for key in ("one", "two"):
        report.add([Failure("leaf", key, "decode", f"{key}: it is broken", skipped=False)])
        report.add([Failure("leaf", key, "decode", f"KeyError: 'more {key}s'", skipped=False)])
    assert [one["count"] for one in report.stats()["reasons"]] == [185, 2, 1, 1]
    others = [Failure("leaf", "key", "decode", chr(0x4E00 + number), skipped=False) for number in range(1100)]
    report.add(others[:16])
    report.log_summary()
    assert "185 x leaf, encode_sample: ValueError: 0 tokens of 'sample0' are no text (one of them)" in caplog.text
    assert "1 x leaf, decode: KeyError: 'more twos'\n" in caplog.text + "\n" and "other reasons" not in caplog.text
    report.add(others[16:])  # a thousand are told apart
    assert [(one["reason"], one["count"]) for one in report.stats()["reasons"]][1] == ("(other reasons)", 104)
    report.log_summary()
    first, *_, last = lines = caplog.messages[-1].splitlines()
    assert "1289 failed" in first and len(lines) == 22 and last == "  ... and 981 other reasons"


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr(observers.time, "monotonic", lambda: self.now)


class Samples:
    """What makes samples, as far as a timer sees it: a second for each step of a job."""

    observers: tuple[Any, ...] = ()

    def __init__(self, clock: Clock, *steps: tuple[str, str]):
        self.clock, self.steps = clock, steps

    def make(self) -> str:
        for observer in self.observers:
            observer.begin()
        for stage, leaf in self.steps:
            for observer in self.observers:
                observer.step(stage, leaf, "key")
            self.clock.now += 1.0
        for observer in self.observers:
            observer.end(())
        self.clock.now += 1.0  # somebody else's
        return "made"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_seconds_by_stage_and_data_set(clock: Clock) -> None:
    COUNTS.take()
    COUNTS.bytes_read += 7
    said: list[Times] = []
    steps = [("read", "a"), ("decode", "a"), ("encode_sample", "a"), ("decode_columns", "b"), ("batch", "*")]
    timer, samples = JobTimer(said.append), Samples(clock, *steps, ("cook_crude_sample", "a"))
    timer.sent = 0.5
    assert timer.run(samples, samples.make) == "made" and samples.observers == ()
    (times,) = said
    assert times.seconds == 7.0 and times.sent == 0.5 and times.reads == Reads(7)
    assert times.steps == [
        ("read", "a", 1.0),
        ("decode", "a", 1.0),
        ("hooks", "a", 2.0),
        ("decode", "b", 1.0),
        ("batch", "*", 1.0),
    ]
    work = WorkSeconds()
    work.add(times)
    work.busy = 70.0  # ten jobs of this kind, of which one was timed
    expected = {"read": 10.0, "decode": 20.0, "hooks": 20.0, "batch": 10.0, "other": 10.0}
    assert work.sum().by_stage() == pytest.approx(expected)
    assert work.by_leaf() == [
        {"dataset": "a", "read": 10.0, "decode": 10.0, "hooks": 20.0},
        {"dataset": "b", "read": 0.0, "decode": 10.0, "hooks": 0.0},
    ]


@pytest.mark.parametrize("steps", [1, 64, 1000])
def test_to_look_takes_a_250th_of_the_time_at_most(clock: Clock, steps: int) -> None:
    timer, samples = JobTimer(lambda _: None), Samples(clock, *[("decode", "a")] * steps)
    began = clock.now
    timer.run(samples, samples.make)
    assert timer.due - began == pytest.approx((steps + 24) * 1.5e-6 * 250)
    assert timer.due < clock.now, "slow jobs are timed one by one"


def test_a_job_that_fails_is_timed_and_nobody_looks_on_behind_it(clock: Clock) -> None:
    said: list[Times] = []
    timer, samples = JobTimer(said.append), Samples(clock, ("decode", "a"))

    def fail() -> None:
        samples.make()
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        timer.run(samples, fail)
    assert samples.observers == () and said[0].seconds == 2.0


def test_it_costs_a_few_microseconds() -> None:
    timer = JobTimer(lambda _: None)
    samples: Any = type("Samples", (), {"observers": ()})()
    best = min(timeit.repeat(lambda: timer.run(samples, lambda: None), repeat=200, number=1))
    assert best < 24 * 1.5e-6, "a timed job costs more than is reckoned with"


#: Seconds of a job by stage.
PARTS = st.tuples(*[st.integers(0, 1000)] * len(STAGES)).filter(any)


def add(work: WorkSeconds, parts: tuple[int, ...], timed: bool) -> None:
    """A job is done, by whichever worker."""
    if timed:
        steps = [(stage, "a", float(part)) for stage, part in zip(STAGES, parts, strict=True) if stage != "other"]
        work.add(Times(float(sum(parts)), steps, cpu_seconds=float(parts[0])))
    work.busy += sum(parts)


@given(st.lists(st.tuples(PARTS, st.booleans()), max_size=20))
def test_no_stage_is_wrong_by_more_than_nobody_has_timed(jobs: list[tuple[tuple[int, ...], bool]]) -> None:
    work = WorkSeconds()
    for parts, timed in jobs:
        add(work, parts, timed)
    found, unknown = work.sum().by_stage(), sum(sum(parts) for parts, timed in jobs if not timed)
    if not any(timed for _, timed in jobs):
        assert not any(found.values())
        return
    assert sum(found.values()) == pytest.approx(work.busy)
    for number, stage in enumerate(STAGES):
        assert abs(found[stage] - sum(parts[number] for parts, _ in jobs)) <= unknown + 1e-6 * work.busy, stage
    assert sum(float(one["decode"]) for one in work.by_leaf()) == pytest.approx(found["decode"])


def test_a_slow_beginning_says_nothing_about_what_follows() -> None:
    work = WorkSeconds()
    add(work, (5000, 0, 0, 0, 0), True)  # files are opened
    for number in range(1000):
        add(work, (1, 9, 0, 0, 0), number % 100 == 99)
    found = work.sum().by_stage()
    assert found["read"] == pytest.approx(6000) and found["decode"] == pytest.approx(9000)
    before = work.sum()
    add(work, (0, 0, 10, 0, 0), True)
    assert work.sum().since(before).by_stage() == pytest.approx(dict.fromkeys(STAGES, 0.0) | {"hooks": 10.0}, abs=1e-6)
