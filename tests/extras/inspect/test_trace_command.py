"""A loader's trace: what is written, and what is shown of it."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import Capacity, Greedy, SavableDataLoader, SkipSample, TaskEncoder
from energon_lite.batching import TokenSequence
from energon_lite.extras.inspect.trace import chrome_events, read_runs
from energon_lite.loading.makers import observers
from energon_lite.storage.index.columns import write_column
from tests.testing import blend_of, command, json_lines, nightly_but, output_of, take, train_loader


class Slow(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        time.sleep(0.02 if sample.text == "a-7" else 0.001)
        return sample


class Clock:
    """Stands for the module ``time`` where stages are timed: an eighth of a second passes with each look, and what a
    hook says. So nothing that the machine does besides counts."""

    now = 0.0

    @classmethod
    def monotonic(cls) -> float:
        cls.now += 1 / 8
        return cls.now

    thread_time = staticmethod(time.thread_time)


class SlowByClock(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        Clock.now += 500 if sample.text == "a-7" else 100
        return sample


class Packs(Slow):
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[:2], samples[2:]]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return {"__key__": "+".join(sample.__key__ for sample in samples), "size": len(samples)}


def _kept(sample: Any) -> dict[str, Any]:
    """A piece without a key; some samples are left out."""
    if sample.text.endswith("3"):
        raise SkipSample("three")
    return {"names": [sample.__key__], "tokens": torch.zeros(len(sample.text))}


class Named(Packs):
    """Packs that have no key of their own, and samples that yield two pieces each."""

    def encode_sample(self, sample: Any) -> Any:
        yield from [_kept(sample)] * 2

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        yield from [self.batch(samples)] * 2

    def batch(self, samples: list[Any]) -> Any:
        return {"names": [name for sample in samples for name in sample["names"]]}


class Grouped(Named):
    def encode_sample(self, sample: Any) -> Any:
        return _kept(sample)

    def batch_group_criterion(self, sample: Any) -> Any:
        return len(sample["tokens"]), None


class Lengths(TaskEncoder):
    """Samples that are cut into pieces, which come into different batches."""

    def encode_sample(self, sample: Any) -> Any:
        _kept(sample)
        return TokenSequence.derive_from(sample, tokens=torch.arange(7), labels=torch.arange(7))

    def batch(self, samples: list[Any]) -> Any:
        return {"names": [sample.__key__ for sample in samples]}


class Replaced(TaskEncoder):
    """A batch of samples that were put where others had failed."""

    padding = 0

    def encode_sample(self, sample: Any) -> Any:
        return _kept(sample) | {"names": sample.__key__}


def _loader(path: Any, trace: Any, kind: str = "slow", workers: int = 0, **more: Any) -> SavableDataLoader:
    encoder = {"slow": Slow, "clock": SlowByClock, "plain": TaskEncoder, "packs": Packs}[kind]()
    packing = {"packing_buffer_size": 4} if kind == "packs" else {}
    return train_loader(path, workers, trace=trace, task_encoder=encoder, **{"batch_size": 4, **packing, **more})


def _names(batch: Any) -> list[str]:
    found = batch.get("names", batch.get("__key__")) if isinstance(batch, dict) else batch.__key__
    return [found] if isinstance(found, str) else list(found)


WORKERS = [(0, "fork"), (2, "fork"), (2, "thread")]


@pytest.mark.parametrize(("workers", "method"), WORKERS)
@pytest.mark.parametrize("kind", ["slow", "plain", "packs"])
def test_a_line_for_each_batch(leaf_of: Any, tmp_path: Path, kind: str, workers: int, method: str) -> None:
    file = tmp_path / "new" / "trace.jsonl"
    with _loader(leaf_of(30), file, kind, workers, start_method=method) as loader:
        keys = [_names(batch) for batch in take(loader, 8)]
    with _loader(leaf_of(30), None, kind, workers) as loader:
        assert keys == [_names(batch) for batch in take(loader, 8)]
        assert not loader._runner.services.observers, "nothing is timed unasked"
    header, *lines = json_lines(file)
    assert (header["format"], header["rank"]) == ("energon_lite.trace", 0)
    assert (header["t"], header["r"]) == ("SavableLoader.__init__", 0)  # as in Energon's debug files
    assert [line["keys"] for line in lines] == keys and [line["step"] for line in lines] == list(range(8))
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        assert line["asked"] <= line["delivered"] and line["began"] <= line["ended"] <= line["delivered"]
        assert following is None or line["delivered"] <= following["asked"]
        inside = sum(seconds for stage, seconds in line["stages"].items() if stage != "transfer")
        assert 0 < inside <= line["ended"] - line["began"] + 1e-6
        assert line["stages"].keys() <= {"read", "decode", "hooks", "batch", "transfer"}
    stages = {stage for line in lines for stage in line["stages"]}
    assert {"read", "decode", "batch"} <= stages
    assert ("hooks" in stages) == (kind != "plain") and ("transfer" in stages) == (method == "fork" and workers > 0)
    if kind == "slow":
        assert all([key for key, _ in line["samples"]] == line["keys"] for line in lines)
        assert all(seconds >= 0.001 for line in lines for _, seconds in line["samples"])
        assert all(line["stages"]["hooks"] >= 0.004 for line in lines)


PIECES = Greedy(Capacity(5), oversize="split")
ENCODERS: dict[str, tuple[type[TaskEncoder], dict[str, Any]]] = {
    "columns": (TaskEncoder, {"batch_size": 4}),
    "replaced": (Replaced, {"batch_size": 4}),
    "single": (Replaced, {"batch_size": None}),
    "packs": (Named, {"batch_size": 2, "packing_buffer_size": 4}),
    "single packs": (Named, {"batch_size": None, "packing_buffer_size": 4}),
    "groups": (Grouped, {"batch_size": 3}),
    "by lengths": (Lengths, {"batch_size": None, "batching": PIECES, "length_column": None, "chunk_size": 20}),
    "planned": (Lengths, {"batch_size": None, "batching": PIECES}),
}


@pytest.mark.parametrize(
    ("kind", "workers", "method"),
    # Each kind with one kind of workers; at night with the others.
    nightly_but({0, 4, 8, 9, 13, 17, 20, 22}, ((kind, *workers) for kind in ENCODERS for workers in WORKERS)),
)
@pytest.mark.slow
def test_a_line_has_the_samples_of_its_batch(
    leaf_of: Any, tmp_path: Path, kind: str, workers: int, method: Any
) -> None:
    encoder, arguments = ENCODERS[kind]
    tag = "q" if kind == "planned" else ""
    leaves = [leaf_of(30, f"a{tag}"), leaf_of(20, f"b{tag}")]
    if kind == "planned":
        for leaf, count in zip(leaves, (30, 20), strict=True):
            write_column(str(leaf), "length", np.full(count, 7, dtype=np.int64))
    blend, trace = blend_of((leaf, 1) for leaf in leaves), tmp_path / "trace.jsonl"
    arguments = arguments | {"task_encoder": encoder(), "trace": trace, "start_method": method}
    with train_loader(blend, workers, **arguments) as loader:
        batches = take(loader, 12)
    _, *lines = json_lines(trace)
    for line, batch in zip(lines, batches, strict=True):
        # Pieces of a sample may stand in a batch together; the line has it once for each item.
        assert {key for _, key in line["sources"]} == set(_names(batch))
        assert all(key.startswith("ab"[leaf]) for leaf, key in line["sources"])


def test_each_rank_has_its_file_and_a_second_run_goes_on_in_it(leaf_of: Any, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    for _ in range(2):
        for rank in range(2):
            with _loader(leaf_of(30), file, rank=rank, world_size=2) as loader:
                take(loader, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.rank0.jsonl", "trace.rank1.jsonl"]
    runs, unread = read_runs([str(tmp_path / "trace.rank1.jsonl")])
    assert [(run.rank, len(run.batches)) for run in runs] == [(1, 3), (1, 3)] and not unread
    assert [batch["step"] for batch in runs[0].batches] == [0, 1, 2]


@pytest.mark.parametrize("bad", ["/dev/full", "/proc/nowhere/trace.jsonl"])
def test_a_file_that_cannot_be_written_ends_nothing(leaf_of: Any, bad: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with _loader(leaf_of(30), bad) as loader:
        assert len(take(loader, 5)) == 5
    assert caplog.text.count("cannot be written") == 1 and bad in caplog.text


@pytest.fixture
def traced(leaf_of: Any, tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    with _loader(leaf_of(30), file, workers=1) as loader:
        take(loader, 15)  # two epochs
    return file


def test_the_tables(leaf_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "time", Clock)
    file = tmp_path / "trace.jsonl"
    with _loader(leaf_of(30), file, "clock", workers=1, start_method="fork") as loader:
        take(loader, 15)  # two epochs
    lines = output_of("trace", file, "--slowest", 3).splitlines()
    assert lines[0].startswith("15 batches, 60 samples") and "the trainer waited" in lines[0]
    assert [line.split()[0] for line in lines[3:9]] == ["read", "decode", "hooks", "batch", "transfer", "other"]
    shares = [float(line.split()[2]) for line in lines[3:9]]
    assert abs(sum(shares) - 100) < 1 and max(shares) == shares[2]
    assert lines[10].startswith("slowest samples") and len(lines) == 14
    assert [line.split()[0] for line in lines[11:13]] == ["a-7", "a-7"]
    assert all(500_000 < float(line.split()[1]) < 501_000 for line in lines[11:13])
    assert 100_000 < float(lines[13].split()[1]) < 101_000
    said = json.loads(output_of("trace", file, "--slowest", "3", "--json"))
    assert (said["batches"], said["samples"], said["ranks"], said["keys"]) == (15, 60, [0], {})
    assert said["stages"]["read"] > 0 and said["stages"]["other"] >= 0


def test_when_a_sample_was_seen(traced: Path) -> None:
    lines = output_of("trace", traced, "--key", "a-7").splitlines()
    assert lines[0] == "a-7: seen 2 times"
    at = [batch for batch in json_lines(traced)[1:] if "a-7" in batch["keys"]]
    for line, batch in zip(lines[1:3], at, strict=True):
        assert f"rank 0, pass 0, step {batch['step']}, place {batch['keys'].index('a-7')}, " in line


def test_a_sample_inside_of_a_pack(leaf_of: Any, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    with _loader(leaf_of(30), file, "packs") as loader:
        batches = take(loader, 2)
    keys = [key for batch in batches for pack in batch["__key__"] for key in pack.split("+")]
    seen = output_of("trace", file, "-k", keys[-1])
    assert f"{keys[-1]}: seen 1 time\n" in seen and "step 1" in seen
    later = next(f"a-{number}" for number in range(30) if f"a-{number}" not in keys)
    unseen = output_of("trace", file, "-k", later)
    assert unseen.startswith(f"{later}: not seen so far; it is in {leaf_of(30)}, shard-00")
    with _loader(leaf_of(30), tmp_path / "single.jsonl", "packs", batch_size=None) as loader:
        (pack,) = take(loader, 1)
    assert json_lines(tmp_path / "single.jsonl")[1]["keys"] == [pack["__key__"]]


def test_a_key_that_no_data_set_has(traced: Path, leaf_of: Any) -> None:
    code, said = command("trace", traced, "-k", "nobody", "-k", "a-7")
    assert code == 1 and "a-7: seen 2 times" in said
    assert f"nobody: no data set of the trace has a sample with this key ({leaf_of(30)})" in said
    moved = traced.with_name("moved.jsonl")
    moved.write_text(traced.read_text().replace(str(leaf_of(30)), "/gone"))
    code, said = command("trace", moved, "-k", "nobody")
    assert code == 1 and "nobody: not seen so far; /gone cannot be searched for it" in said


def test_the_chrome_trace(traced: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert "ui.perfetto.dev" in output_of("trace", traced, "-o", out)
    events = json.loads(out.read_text())["traceEvents"]
    assert events == list(chrome_events(read_runs([str(traced)])[0]))
    boxes = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in boxes)
    names = [event["name"] for event in boxes]
    assert names.count("step") == 14 and names.count("hooks") == names.count("batch") == 15
    assert sum(name.startswith("wait for step ") for name in names) == 15
    for number in range(15):  # the stages lie inside of their batch
        (whole,) = [event for event in boxes if event["name"] == f"step {number}"]
        assert len(whole["args"]["keys"]) == 4
    titles = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert titles[:2] == ["rank 0", "trainer"] and titles[2].startswith("worker ")


def test_lines_that_are_cut_off_are_left_out(traced: Path) -> None:
    traced.write_bytes(traced.read_bytes()[:-20])
    said = output_of("trace", traced)
    assert "14 batches" in said and "1 line left out: unreadable" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no batch"),
        ('{"asked": 1}\n', "this is not a trace"),
        ('{"format": "energon_lite.trace", "version": 9, "rank": 0, "clock": 0}\n', "upgrade the library"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    code, said = command("trace", tmp_path / "x.jsonl")
    assert code == 1 and message in said
