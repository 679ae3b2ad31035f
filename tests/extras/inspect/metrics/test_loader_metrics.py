"""Where a loader's numbers go, and those of all ranks together."""

from __future__ import annotations

import json
import logging
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from energon_lite import SkipSample, TaskEncoder
from energon_lite.errors import TopologyError, UsageError
from energon_lite.extras.inspect import MetricsFile, PrometheusEndpoint, TensorBoardFolder
from tests.testing import json_lines, take, told_of, train_loader
from tests.trainer.parallel.rank_processes import run_ranks


class Sleeps(TaskEncoder):
    def __init__(self, seconds: float):
        self.seconds = seconds

    def encode_sample(self, sample: Any) -> Any:
        time.sleep(self.seconds)
        return sample


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self, fails: bool = False):
        self.lines, self.fails = list[dict[str, Any]](), fails

    def write(self, values: Any) -> None:
        if self.fails:
            raise OSError("no space left")
        self.lines.append(dict(values))

    def close(self) -> None:
        pass


def loader_of(path: Any, rank: int = 0, world: int = 1, seconds: float = 0.0, **more: Any) -> Any:
    more = {"task_encoder": Sleeps(seconds), **more}
    return train_loader(path, rank=rank, world_size=world, batch_size=2, **more)


def test_numbers_go_to_all_of_them(leaf_of: Any, tmp_path: Path) -> None:
    kept, file, board = Kept(), MetricsFile(tmp_path / "loader.jsonl"), TensorBoardFolder(tmp_path / "board")
    with PrometheusEndpoint(0) as page:
        with loader_of(leaf_of(30), metrics=[kept, file, page, board], metrics_every=5) as loader:
            take(loader, 11)
        with urllib.request.urlopen(page.url, timeout=10) as answer:
            text = answer.read().decode()
    assert [line["step"] for line in kept.lines] == [5, 10]
    last = kept.lines[-1]
    assert last["loader/samples"] == 20 and last["loader/samples_per_second"] > 0
    assert {"loader/queue_ready", "loader/queue_pending", "loader/queue_bytes_in_flight"} <= last.keys()
    assert sorted(value for name, value in last.items() if name.startswith("loader/bottleneck/")) == [0, 0, 0, 0, 1]
    assert sum(value for name, value in last.items() if name.startswith("loader/dataset_samples/")) == 20
    lines = json_lines(tmp_path / "loader.jsonl")
    assert [line["loader/batches"] for line in lines] == [5, 10] and lines[0]["time"] > 1.7e9
    assert "energon_lite_loader_samples_total 20\n" in text and 'stage_seconds_total{name="decode"}' in text
    file.close()
    board.close()
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loader/samples")] == [(5, 10), (10, 20)]


def test_a_sink_that_fails_is_left_out_and_the_run_goes_on(leaf_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    with loader_of(leaf_of(30), metrics=[Kept(fails=True), kept], metrics_every=2) as loader:
        take(loader, 6)
    assert len(kept.lines) == 3
    warnings = told_of(caplog, "left out from now on")
    assert len(warnings) == 1 and "Kept cannot be written to" in warnings[0] and "no space left" in warnings[0]
    with pytest.raises(UsageError, match="metrics_every is 0"):
        loader_of(leaf_of(30), metrics_every=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_read_and_how_long_it_took(leaf_of: Any, workers: int) -> None:
    # Jobs of 20 ms, slower than a timer's pause: each of them is timed, also on a machine on which others work.
    with loader_of(leaf_of(30), seconds=1e-2, num_workers=workers) as loader:
        take(loader, 15)
        stats = loader.stats()
    json.dumps(stats)
    # 3 or 4 bytes of each sample; workers are at most some batches further.
    assert 3 * 30 <= stats["bytes_read"] <= 4 * (30 + 2 * 2 * 5)
    assert stats["cache"] == {"memory_hits": 0, "folder_hits": 0, "stored_samples": 0, "requests": 0}
    seconds = stats["stage_seconds"]
    assert seconds.keys() == {"read", "decode", "hooks", "batch", "other", "transfer"}
    assert seconds["hooks"] >= 15 * 2 * 1e-2 and seconds["read"] > 0 and seconds["decode"] > 0
    assert bool(seconds["transfer"]) == bool(workers)
    (own,) = stats["dataset_seconds"]
    assert own["hooks"] == pytest.approx(seconds["hooks"]) and own["dataset"] == stats["datasets"][0]["dataset"]


def test_all_ranks_together(leaf_of: Any, tmp_path: Path) -> None:
    path = leaf_of(30)

    def one(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        loader = loader_of(path, rank, 2, seconds=5e-3 * rank)
        take(loader, 8)
        with pytest.raises(TopologyError, match="world_size is 3, but the data-parallel group has 2 ranks"):
            loader_of(path, rank, 3).gather_stats()
        return loader.stats(), loader.gather_stats()

    (first, both), (second, same) = run_ranks(2, one, folder=tmp_path)
    assert both == same and both["ranks"] == [first, second]
    waits = [first["wait_seconds"], second["wait_seconds"]]
    assert waits[1] >= 8 * 2 * 5e-3 and both["wait_seconds_mean"] == sum(waits) / 2
    # Usually the second, but somebody else may have kept the first one from its core.
    assert both["wait_seconds"] == max(waits) and both["wait_rank"] == waits.index(max(waits))
    assert both["samples"] == 32 and both["bottleneck"] == both["ranks"][both["wait_rank"]]["bottleneck"] is not None


def test_ranks_that_cannot_be_asked(leaf_of: Any) -> None:
    with pytest.raises(UsageError, match="without a process group"):
        loader_of(leaf_of(30), 0, 2).gather_stats()
    alone = loader_of(leaf_of(30)).gather_stats()
    assert alone["wait_rank"] == 0 and alone["ranks"][0]["batches"] == alone["batches"] == 0


class SkipsSome(Sleeps):
    def encode_sample(self, sample: Any) -> Any:
        if sample.text.endswith("3"):
            raise SkipSample("ends with 3")
        return super().encode_sample(sample)


def test_lines_say_what_the_limit_is(leaf_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with loader_of(leaf_of(30), task_encoder=SkipsSome(2e-2), log_every=10) as loader:
        take(loader, 20)
    lines = told_of(caplog, "the limit is hooks (")
    assert len(lines) == 3 and all("num_workers: 0 -> 2" in line for line in lines)
    assert all("samples/s; waited" in line and "MiB in flight; " in line and "skipped" in line for line in lines[:2])
    assert [line.split(":")[0] for line in lines] == ["batch 10", "batch 20", "batch 20"]
    with pytest.raises(UsageError, match="log_every is -1"):
        loader_of(leaf_of(30), log_every=-1)
