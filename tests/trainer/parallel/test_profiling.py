"""The profiler's window: traces of the steps it names, and the picture that is made of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from energon_lite.errors import ConfigError
from energon_lite.trainer import TrainConfig
from tests.fork_server import run_program
from tests.testing import nightly_but
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.small_runs import make_config, metrics, train


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


TOOL = Path(__file__).parents[3] / "tools/draw_schedule.py"


@pytest.mark.parametrize("virtual", nightly_but({1}, [1, 2]))
def test_a_window_leaves_traces_and_a_picture(run_ranks: RunRanks, blend: Path, tmp_path: Path, virtual: int) -> None:
    config = make_config(blend, tmp_path / "run", mesh={"pp": 2, "virtual": virtual}, steps=4, profile=[2, 3])
    if virtual == 2:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=4))
    run_ranks(2, lambda rank: train(config))
    folder = tmp_path / "run/profile"
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
    command = [TOOL, folder, tmp_path / "x.png", "--trace", tmp_path / "x.json"]
    done = run_program(command, capture_output=True, text=True, timeout=300, check=True).stdout
    assert ("1F1B" if virtual == 1 else "interleaved, 2 chunks") in done and "2 stages, 4 micro-batches" in done
    assert (tmp_path / "x.png").stat().st_size > 5000
    passes = [event for event in events_of(tmp_path / "x.json") if event["ph"] == "X"]
    by_name = {(event["tid"], event["args"]["step"], event["name"]): event for event in passes}
    assert len(by_name) == 32 * virtual
    for number in range(4):
        first, second = by_name[0, 2, f"F{number}.0"], by_name[1, 2, f"F{number}.0"]
        assert second["ts"] >= first["ts"] + first["dur"] - 1000


def test_a_profiled_run_is_the_same_run(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    for name, window in (("plain", None), ("profiled", [1, 2])):
        config = make_config(blend, tmp_path / name, steps=3, profile=window)
        run_ranks(1, lambda rank, c=config: train(c))
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "profiled")


def test_steps_that_are_profiled_are_not_measured(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    """Both would wait for each pass; the first observer gets the passes."""
    config = make_config(blend, tmp_path / "run", steps=5, profile=[1, 2], measure_costs=2)
    run_ranks(2, lambda rank: train(config))
    assert [line["step"] for line in metrics(tmp_path / "run") if "rank_balance" in line] == [4]
    assert len(events_of(tmp_path / "run/profile/passes-rank001.json")) == 1 + 2 * 2 * 2
    measured = [json.loads(line) for line in (tmp_path / "run/micro_batches.jsonl").read_text().splitlines()]
    assert [line["step"] for line in measured] == [4]


@pytest.mark.parametrize("window", [(0, 3), (4, 3)])
def test_a_window_that_is_none_is_refused(window: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="not a window of steps"):
        TrainConfig(profile=window)
