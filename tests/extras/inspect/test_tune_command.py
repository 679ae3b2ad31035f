"""``energon-lite tune``: real loaders, for a short time."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from energon_lite import ReadAhead, Reading, TaskEncoder, get_train_dataset, stateless
from energon_lite.extras.inspect.tune_command import LoaderSpeed, available_memory, memory_of
from energon_lite.extras.inspect.tuning import Setting
from tests.testing import alone, command, invoke, output_of

HERE = "tests.extras.inspect.test_tune_command"
TRAINER = os.getpid()


class Sleeps(TaskEncoder):
    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> Any:
        time.sleep(0.01)
        return {"key": sample.__key__}


class Hungry(TaskEncoder):
    kept: bytearray | None = None

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> Any:
        if os.getpid() != TRAINER and self.kept is None:
            self.kept = bytearray(os.urandom(1 << 20)) * 300
        return {"key": sample.__key__}


@pytest.fixture
def folder(leaf_of: Any) -> Path:
    return Path(leaf_of(120, "tuned"))


@pytest.mark.slow
def test_batches_by_tokens_in_one_word(folder: Path) -> None:
    output_of("measure", folder, "--length-field", "txt", "--no-progress")
    given = ["--seconds", 4, "--most-workers", 1, "--no-threads", "--json"]
    found = invoke("tune", folder, "--batching", "best_fit:capacity=40", *given)
    assert found.exit_code == 0 and json.loads(found.stdout)["best"]["samples"] > 0, found.output


@pytest.mark.nightly  # each time, proposals on machines that are made up (tuning/test_search.py)
def test_it_proposes_workers(folder: Path) -> None:
    given = ["--task-encoder", f"{HERE}:Sleeps", "--batch-size", 4, "--seconds", 20, "--most-workers", 4]
    lines = output_of("tune", folder, *given, "--step-seconds", 0.021).splitlines()
    assert "cores and" in lines[0] and lines[1].startswith("  no workers: ")
    proposal = next(line for line in lines if line.startswith("num_workers="))
    # A batch takes 40 ms: two workers make one in 20 ms, if the machine lets them.
    assert proposal.startswith(("num_workers=2,", "num_workers=3,", "num_workers=4,")), lines
    assert "times as fast as without workers" in proposal and "The loader is then limited by hooks." in lines


def test_what_takes_too_much_memory_is_not_proposed(folder: Path) -> None:
    given = ["--task-encoder", f"{HERE}:Hungry", "--seconds", 12, "--most-workers", 1, "--no-threads", "--json"]
    limit = memory_of(os.getpid()) + (150 << 20)
    result = json.loads(output_of("tune", folder, *given, "--memory-limit", limit))
    assert result["best"]["setting"]["workers"] == 0 and result["best"]["memory"] < limit
    (worker,) = [one for one in result["measured"] if one["setting"]["workers"]]
    assert worker["memory"] > limit


def test_what_cannot_be_loaded_is_said_and_bad_options(folder: Path) -> None:
    for path, options, status, said in (
        (folder / "nothing", ["--seconds", 4], 1, "nothing"),
        (folder, ["--memory-limit", "lots"], 1, "is not a number of bytes"),
        (folder, ["--ranks", 0], 2, ""),
    ):
        code, output = command("tune", path, *options)
        assert code == status and said in output


# -- how fast loaders are, where it is known, and what memory they have ------------------------------------------------


def speed_of(path: Any, **kwargs: Any) -> LoaderSpeed:
    def make(workers: int) -> Any:
        return get_train_dataset(path, batch_size=4, task_encoder=Sleeps(), worker_config=alone(workers), **kwargs)

    return LoaderSpeed(make, 0.4)


def test_no_more_than_the_hooks_allow_and_each_goes_on_where_the_last_one_stopped(leaf_of: Any) -> None:
    measure = speed_of(leaf_of(100))
    places = list[int]()
    for setting in (Setting(0), Setting(2), Setting(2, start_method="thread")):
        speed = measure(setting)
        most = 100 * max(1, setting.workers)
        assert 0.1 * most < speed.samples < 1.1 * most and speed.batches == pytest.approx(speed.samples / 4)
        assert speed.limit is not None and speed.limit["limit"] == "hooks" and speed.memory > 0
        places.append(measure._state["position"])
    assert places == sorted(places) and len(set(places)) == 3


def test_passes_that_end_are_begun_again_and_threads_that_cannot_are_told(leaf_of: Any) -> None:
    assert speed_of(leaf_of(8), repeat=False)(Setting(0)).samples > 0
    measure = speed_of(leaf_of(100), reading=Reading(read_ahead=ReadAhead()))
    found = measure(Setting(2, start_method="thread"))
    assert found.samples == 0 and "read_ahead" in found.error


def test_memory_of_a_process_and_its_children() -> None:
    before = memory_of(os.getpid())
    assert before > 0
    ready, told = os.pipe()
    leave, go = os.pipe()
    child = os.fork()
    if not child:
        kept = bytearray(b"x") * (256 << 20)
        os.write(told, kept[:1])
        os.close(go)
        os.read(leave, 1)
        os._exit(0)
    try:
        os.read(ready, 1)
        # The share of this process in what it maps with others changes when such processes begin and end.
        assert memory_of(os.getpid()) - before > 128 << 20
    finally:
        os.close(go)
        os.waitpid(child, 0)
    assert memory_of(1 << 22) == 0, "there is no such process"
    assert (available_memory() or 0) > 0
