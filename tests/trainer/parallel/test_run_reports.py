"""What a run reports while it goes on, and where: sinks of the user's, numbers read late, rates of groups, checkpoints
far away, the profiler's window, and how long measured micro-batches took on all ranks."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from energon_lite.errors import UsageError
from energon_lite.extras.balance import micro_batch_times, read_cost_model, read_micro_batches
from energon_lite.extras.balance.micro_batch_times import PassTimes, cost_model_of, micro_batch_numbers
from energon_lite.trainer import LlamaModel, ModelConfig, Trainer, read_state
from energon_lite.trainer.checkpointing.files import CheckpointFiles
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.training.metrics import StepMetrics
from energon_lite.trainer.training.pipeline import run_pipeline
from energon_lite.trainer.training.throughput import training_flops
from tests.fork_server import run_program
from tests.testing import nightly_but
from tests.trainer.parallel.copying_store import CopyingStore
from tests.trainer.parallel.small_runs import SmallRuns, disturb_steps, send
from tests.trainer.parallel.their_model import Rows

GROUPS = [{"match": "*norm*", "weight_decay": 0.1, "lr_scale": 0.5}, {"match": "vision.*", "lr_scale": 0.0}]
TOOL = Path(__file__).parents[3] / "tools/draw_schedule.py"


def test_a_sink_of_the_users_gets_the_numbers_on_the_main_rank(runs: SmallRuns) -> None:
    def job(rank: int, steps: int) -> list[Any]:
        told: list[Any] = []

        class Sink:
            def __init__(self, after: int):
                told.append(after)

            def write(self, values: Mapping[str, Any]) -> None:
                told.append(values["step"])

            def close(self) -> None:
                told.append("closed")

        with Trainer(runs.config(steps=steps), sinks=[Sink]) as trainer:
            trainer.run()
        return told

    assert runs.run_ranks(2, lambda rank: job(rank, 2)) == [[0, 1, 2, "closed"], []]
    assert runs.run_ranks(2, lambda rank: job(rank, 4)) == [[2, 3, 4, "closed"], []]


def test_numbers_are_read_when_the_next_step_is_under_way_unless_it_is_to_be_saved(runs: SmallRuns) -> None:
    """Each with the time that it took, its data's included."""

    def job(rank: int) -> list[tuple[str, int]]:
        done: list[tuple[str, int]] = []
        config = runs.config(steps=5, save_every=3)
        with Trainer(config) as trainer:
            take = trainer.data.take_step

            class NotedNumbers(StepMetrics):
                def __call__(self, running: Any) -> Any:
                    done.append(("numbers", running.step))
                    return super().__call__(running)

            def slow(batches: Any) -> Any:
                time.sleep(0.1)
                return take(batches)

            disturb_steps(trainer, lambda _, step: done.append(("launch", step)))
            trainer.numbers = NotedNumbers(config, trainer.mesh)
            trainer.data.take_step = slow  # type: ignore[method-assign]
            trainer.run()
        return done

    began = time.perf_counter()
    (done,) = runs.run_ranks(1, job)
    took = time.perf_counter() - began
    order = "launch 1, launch 2, numbers 1, launch 3, numbers 2, numbers 3, launch 4, launch 5, numbers 4, numbers 5"
    assert ", ".join(f"{what} {step}" for what, step in done) == order
    lines = [json.loads(text) for text in (runs.folder / "run/metrics.jsonl").read_text().splitlines()]
    assert all(0.1 <= entry["data_wait"] < entry["seconds"] for entry in lines)
    assert sum(entry["seconds"] for entry in lines) < took


# -- groups of parameters ----------------------------------------------------------------------------------------------


def test_rates_of_groups_are_reported_and_a_run_with_them_goes_on_elsewhere(runs: SmallRuns) -> None:
    optimizer = {"groups": GROUPS, "schedule": "constant"}
    for name, parts in (("whole", [(1, 4)]), ("parts", [(2, 2), (1, 4)])):
        for world, steps in parts:
            runs.train(world, name=name, steps=steps, optimizer=optimizer)
    lines = runs.metrics("whole")
    assert all(line["lr *norm*"] == 0.5 * line["lr"] and line["lr vision.*"] == 0.0 for line in lines)
    assert len({line["lr"] for line in lines}) > 1
    assert [line["loss"] for line in runs.metrics("parts")] == pytest.approx([line["loss"] for line in lines], rel=1e-4)


def test_a_group_without_parameters_is_refused(runs: SmallRuns) -> None:
    (text,) = runs.errors(UsageError, 1, optimizer={"groups": [{"match": "*norn*"}]})
    assert "no parameter that is trained is in the group '*norn*'" in text


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", nightly_but({1}, ["s3", CopyingStore.protocol]), indirect=True)
def test_checkpoints_at_a_url_and_some_that_stay(runs: SmallRuns, root: str) -> None:
    """Metrics stay here."""
    for steps in (5, 7):
        stop = send(signal.SIGTERM, to_rank=0, at=steps)
        assert runs.train(2, stop, steps=9, save_every=1, checkpoints=root, keep_every=3) == [steps] * 2

    def look(rank: int) -> tuple[list[str], str]:
        return CheckpointFiles(root).names(), read_state(f"{root}/step-00000003")["config"]["train"]["checkpoints"]

    assert runs.run_ranks(1, look) == [([f"step-{step:08d}" for step in (3, 6, 7)], root)]
    assert os.listdir(runs.folder / "run") == ["metrics.jsonl"] and len(runs.metrics()) == 7


def test_which_checkpoints_stay(tmp_path: Path) -> None:
    """The first at or after each multiple, wherever checkpoints are made, and the newest."""
    files = CheckpointFiles(tmp_path)
    for step in (7, 9, 12, 15, 21, 22, 30, 31, 32):
        files.begin(step)
        files.publish(step, {})
        files.prune(2, 10)
    assert files.names() == [f"step-{step:08d}" for step in (12, 21, 30, 31, 32)]
    files.prune(1)
    assert files.names() == ["step-00000032"]


# -- the profiler's window ---------------------------------------------------------------------------------------------


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


@pytest.mark.parametrize("virtual", nightly_but({1}, [1, 2]))
def test_a_window_leaves_traces_and_a_picture(runs: SmallRuns, virtual: int) -> None:
    mesh = {"pp": 2, "virtual": virtual}
    runs.train(2, mesh=mesh, model={"num_layers": 4}, steps=4, profile=[2, 3])
    folder, trace, picture = (runs.folder / name for name in ("run/profile", "x.json", "x.png"))
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"{kind}-rank00{rank}.json" for kind in ("kernels", "passes") for rank in (0, 1)]
    for rank in range(2):
        events = events_of(folder / f"passes-rank00{rank}.json")[1:]
        assert [event["args"]["step"] for event in events] == [2] * 8 * virtual + [3] * 8 * virtual
        ends = [event["ts"] + event["dur"] for event in events]
        assert all(end <= after["ts"] + 1 for end, after in zip(ends, events[1:], strict=False))
        # A micro-batch goes back through a chunk once, behind its way forward.
        done = [event["name"] for event in events[: 8 * virtual]]
        for number in range(4):
            for chunk in range(virtual):
                assert done.index(f"F{number}.{chunk}") < done.index(f"B{number}.{chunk}")
        steps = [event["name"] for event in events_of(folder / f"kernels-rank00{rank}.json")]
        assert "step 2" in steps and "step 3" in steps and "step 1" not in steps and "step 4" not in steps
    # The last stage begins a micro-batch when the first one has sent it: the ranks' clocks are one.
    command = [TOOL, folder, picture, "--trace", trace]
    done = run_program(command, capture_output=True, text=True, timeout=300, check=True).stdout
    assert ("1F1B" if virtual == 1 else "interleaved, 2 chunks") in done and "2 stages, 4 micro-batches" in done
    assert picture.stat().st_size > 5000
    passes = [event for event in events_of(trace) if event["ph"] == "X"]
    by_name = {(event["tid"], event["args"]["step"], event["name"]): event for event in passes}
    assert len(by_name) == 32 * virtual
    for number in range(4):
        first, second = by_name[0, 2, f"F{number}.0"], by_name[1, 2, f"F{number}.0"]
        assert second["ts"] >= first["ts"] + first["dur"] - 1000


def test_a_profiled_run_is_the_same_run(runs: SmallRuns) -> None:
    for name, window in (("plain", None), ("profiled", [1, 2])):
        runs.train(1, name=name, steps=3, profile=window)
    assert runs.metrics("plain") == runs.metrics("profiled")


def test_steps_that_are_profiled_are_not_measured(runs: SmallRuns) -> None:
    """Both would wait for each pass; the first observer gets the passes."""
    runs.train(2, steps=5, profile=[1, 2], measure_costs=2)
    assert [line["step"] for line in runs.metrics() if "rank_balance" in line] == [4]
    assert len(events_of(runs.folder / "run/profile/passes-rank001.json")) == 1 + 2 * 2 * 2
    measured = [json.loads(line) for line in (runs.folder / "run/micro_batches.jsonl").read_text().splitlines()]
    assert [line["step"] for line in measured] == [4]


# -- measured micro-batches: what is in them, how long they took, and the costs that follow ----------------------------

SHAPE = ModelConfig(hidden_size=8, num_layers=2, num_heads=2, ffn_size=16, vocab_size=300, image_size=8, patch_size=2)


def batch(documents: list[list[int]] | None, images: list[tuple[int, int]]) -> Rows:
    tokens, of_images = torch.zeros(2, 10, dtype=torch.int64), torch.zeros(len(images), dtype=torch.int64)
    counted = torch.cat([torch.ones(2, 4), torch.zeros(2, 6)], dim=1)
    made = Rows(tokens, tokens, counted, torch.zeros(len(images), 3, 8, 8), of_images, of_images)
    made.documents = None if documents is None else torch.tensor(documents)
    made.image_sizes = images if images != [(8, 8)] * len(images) else None
    return made


def test_what_is_in_a_micro_batch() -> None:
    found = micro_batch_numbers(batch(None, [(8, 8), (4, 6)]), SHAPE)
    assert found == {
        **{"tokens": 20, "squared_tokens": 200, "segments": 2, "loss_tokens": 8},
        **{"images": 2, "patches": 16 + 6, "squared_patches": 256 + 36},
    }
    packed = [[0] * 3 + [1] * 7, [1] * 4 + [2] * 6]  # a row's end ends a document
    found = micro_batch_numbers(batch(packed, [(8, 8)]), SHAPE)
    assert (found["tokens"], found["segments"], found["squared_tokens"]) == (20, 4, 9 + 49 + 16 + 36)
    assert (found["images"], found["patches"]) == (1, 16)


def test_costs_by_the_shape_are_those_that_mfu_counts() -> None:
    model = cost_model_of(SHAPE)
    numbers = {name: [value] for name, value in micro_batch_numbers(batch(None, []), SHAPE).items()}
    nanoseconds = model.micro_batch_costs(numbers)[0]
    assert nanoseconds == pytest.approx(training_flops(SHAPE, 20, 2 * 55) / 4e14 * 1e9, abs=2)


def test_passes_are_added_up_by_micro_batch() -> None:
    model = LlamaModel(SHAPE, ParallelMesh(), seed=0)
    passes, empty = PassTimes(torch.device("cpu")), batch(None, [])
    empty.tokens = empty.tokens[:0]
    run_pipeline(model, [batch(None, []), empty, batch(None, [])], record=passes)
    first, nothing, last = passes.seconds(3)
    assert first > 0 and last > 0 and nothing == 0


@pytest.mark.parametrize(
    ("mesh", "world"), nightly_but({1}, [({}, 2), ({"pp": 2}, 4), ({"tp": 2, "pp": 2, "virtual": 2}, 4)])
)
def test_a_run_measures_and_fits(
    runs: SmallRuns, leaf_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int], world: int
) -> None:
    """By a clock of the test's, each pass takes a millisecond."""
    clock = itertools.count(0.0, 1e-3).__next__
    monkeypatch.setattr(micro_batch_times, "time", SimpleNamespace(thread_time=clock))
    sections = {"data": {"path": str(leaf_of(40))}, "mesh": mesh, "model": {"num_layers": 4, "image_size": 0}}
    settings = sections | {"steps": 7, "save_every": 0, "measure_costs": 2}
    runs.train(world, **settings)
    folder = runs.folder / "run"
    costs = (folder / "costs-000007.json").read_bytes()
    runs.train(world, **settings)  # which has no step to do, and writes nothing over
    assert (folder / "costs-000007.json").read_bytes() == costs
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "rank_balance" in line] == [2, 4, 6]
    assert all(0 < line["rank_balance"] <= 1 and line["cost_error"] >= 0 for line in lines if "rank_balance" in line)
    sizes, seconds, prior = read_micro_batches(folder / "micro_batches.jsonl")
    assert prior == cost_model_of(runs.config(**settings).model)
    assert len(seconds) == 3 * 4 and min(seconds) > 0
    assert sum(sizes["loss_tokens"]) == sum(line["tokens"] for line in lines if "rank_balance" in line)
    fitted = read_cost_model(folder / "costs-000007.json")
    assert fitted.micro_batch_costs(sizes) / 1e9 == pytest.approx(seconds, rel=0.01)


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_file_of_measured_steps(tmp_path: Path) -> None:
    old = {"place": "2 ranks", "seconds": [9.0], "sizes": {"tokens": [9]}}
    new = {"place": "4 ranks", "seconds": [1.0, 0.0, 2.0], "sizes": {"tokens": [1, 0, 2]}}
    more = {"place": "4 ranks", "seconds": [3.0], "sizes": {"tokens": [3], "images": [1]}}
    path = write(tmp_path / "times.jsonl", old, new, more)
    with open(path, "a") as stream:
        stream.write('{"seconds": [')  # a crash
    assert read_micro_batches(path) == ({"tokens": [1, 2, 3], "images": [0, 0, 1]}, [1.0, 2.0, 3.0], None)
    no_number, too_few = {"seconds": ["long"], "sizes": {}}, {"seconds": [1.0], "sizes": {"tokens": []}}
    for wrong in ({}, no_number, too_few, {**more, "prior": 1}):
        with pytest.raises(UsageError, match="line 1"):
            read_micro_batches(write(path, wrong))
    with pytest.raises(UsageError, match="measure some steps"):
        read_micro_batches(tmp_path / "nothing")
