"""Checks of the demo can fail: one bit, a missing step, a run that ends too early or goes on after a kill."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.demo.__main__ import check_close
from examples.demo.errors import DemoError
from examples.demo.losses import Comparison, Metrics, compare, last_step, read_metrics, table
from examples.demo.parts import check_equal, start_again, train, train_until_kill
from examples.demo.processes import Kill
from examples.demo.report import Report
from examples.demo.run import Run
from examples.demo.steps import Steps

# -- losses ------------------------------------------------------------------------------------------------------------


def with_losses(*losses: float, first: int = 1) -> Metrics:
    return {first + i: {"step": first + i, "loss": loss, "grad_norm": 1.0} for i, loss in enumerate(losses)}


def write(path: Path, metrics: Metrics, rest: str = "") -> Path:
    path.write_text("".join(json.dumps(values) + "\n" for values in metrics.values()) + rest)
    return path


def test_metrics_keep_every_bit(tmp_path: Path) -> None:
    metrics = with_losses(0.1 + 0.2, math.pi, 5e-324)
    assert read_metrics(write(tmp_path / "m.jsonl", metrics)) == metrics


@pytest.mark.parametrize(
    "rest",
    ['{"step": 3, "lo', '{"step": 3, "loss": 2.0, "grad_norm": 1.0}'],  # of the second, a number may lack digits
)
def test_a_line_that_a_kill_has_cut_is_left_out(tmp_path: Path, rest: str) -> None:
    path = write(tmp_path / "m.jsonl", with_losses(3.0, 2.0), rest=rest)
    assert sorted(read_metrics(path)) == [1, 2] and last_step(path) == 2
    assert last_step(tmp_path / "missing.jsonl") == last_step(write(path, {})) == 0


def test_the_last_step_of_a_long_file_is_found_at_its_end(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", with_losses(*[1.0] * 1000))
    assert path.stat().st_size > 3 * 4096
    assert last_step(path) == 1000


def test_equal_runs_are_identical() -> None:
    found = compare(with_losses(3.0, 2.0, 1.0), with_losses(2.0, 1.0, first=2), [2, 3])
    assert found == Comparison(first=2, last=3, steps=2, equal=2, largest=0.0, at=2)
    assert found.identical
    assert str(found) == "steps 2 to 3: all 2 equal to the last bit"


def test_one_last_bit_is_a_difference() -> None:
    found = compare(with_losses(3.0, 2.0), with_losses(3.0, math.nextafter(2.0, 3.0)), [1, 2])
    assert not found.identical
    assert (found.equal, found.largest, found.at) == (1, 2**-51, 2)
    assert str(found) == "steps 1 to 2: 1 of 2 equal to the last bit, largest difference 4.4e-16 at step 2"


def test_another_gradient_is_a_difference_even_if_the_loss_is_equal() -> None:
    other = with_losses(3.0)
    other[1]["grad_norm"] = 2.0
    found = compare(with_losses(3.0), other, [1])
    assert (found.identical, found.largest) == (False, 0.0)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (None, "Step 2 is missing"),
        ({"loss": None, "grad_norm": 1.0}, "loss of step 2 is None"),
        ({"loss": math.nan, "grad_norm": 1.0}, "loss of step 2 is nan"),
        ({"loss": 2.0}, "grad_norm of step 2 is None"),
    ],
)
def test_what_cannot_be_compared_is_an_error(step: dict[str, Any] | None, says: str) -> None:
    other = with_losses(3.0) | ({} if step is None else {2: step})
    with pytest.raises(DemoError, match=says):
        compare(with_losses(3.0, 2.0), other, [1, 2])
    with pytest.raises(DemoError, match="no steps"):
        compare(other, other, [])


def test_a_table_shows_all_digits_and_gaps() -> None:
    shown = table({"one": with_losses(0.1 + 0.2), "two": with_losses(2.0, first=2)}, [1, 2]).splitlines()
    assert [line.split() for line in shown] == [
        ["step", "one", "two"],
        ["1", "0.30000000000000004", "-"],
        ["2", "-", "2.0"],
    ]
    assert len({len(line) for line in shown}) == 1


# -- checks ------------------------------------------------------------------------------------------------------------


STEPS = Steps(total=4, resume=2, kill=3)


def run_of(first: int, last: int, *, off: float = 0.0) -> Metrics:
    return with_losses(*(5.0 / step + off for step in range(first, last + 1)), first=first)


@dataclass(frozen=True)
class FakeRun(Run):
    """A run that ends at once, with this exit code and these metrics."""

    config: Path = Path("c.yaml")
    output: Path = Path("out")
    tp: int = 1
    code: int = 0
    lines: str = ""

    def train(self, *, meanwhile: Callable[[int], None] | None = None) -> int:
        self.output.mkdir(parents=True, exist_ok=True)
        self.log.write_text("the reason\n")
        self.metrics.write_text(self.lines)
        return self.code


def test_one_bit_before_the_kill_or_after_it_fails() -> None:
    reference, before, after = run_of(1, 4), run_of(1, 3), run_of(3, 4)
    before[2]["loss"] = math.nextafter(before[2]["loss"], 9.0)
    report = Report()
    check_equal(report, reference, before, after)
    assert [good for _, _, good in report.results] == [False, True]
    after[4]["loss"] = math.nextafter(after[4]["loss"], 0.0)
    report = Report()
    check_equal(report, reference, run_of(1, 3), after)
    assert [good for _, _, good in report.results] == [True, False]


@pytest.mark.parametrize(("off", "good"), [(0.0, True), (0.9e-5, True), (1.1e-5, False)])
def test_another_layout_may_be_off_by_a_hundred_thousandth(off: float, good: bool) -> None:
    report = Report()
    check_close(report, run_of(1, 4), run_of(3, 4, off=off))
    assert [result[2] for result in report.results] == [good]


@pytest.mark.parametrize(
    ("run", "fake", "says"),
    [
        (train, {"code": 7}, r"exit code 7.*\n.*the reason"),
        (train, {"lines": '{"step": 3, "loss": 1.0, "grad_norm": 1.0}\n'}, "ends at step 3 instead of 4"),
        (train_until_kill, {"code": 1}, "before a rank could be killed"),
    ],
    ids=["it fails", "it ends early", "nobody killed it"],
)
def test_what_ends_the_demo(tmp_path: Path, run: Callable[..., Any], fake: dict[str, Any], says: str) -> None:
    with pytest.raises(DemoError, match=says):
        run(FakeRun(output=tmp_path, **fake), STEPS)


def test_success_in_spite_of_the_kill_ends_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.demo.parts.KillWatcher.kill", Kill(3, 12345, 3, ()), raising=False)
    monkeypatch.setattr("examples.demo.parts.KillWatcher.__init__", lambda self, *_, **__: None)
    with pytest.raises(DemoError, match="reported success"):
        train_until_kill(FakeRun(output=tmp_path, code=0), STEPS)


def finished(checkpoint: Path) -> None:
    """A checkpoint of no files, all of which are there."""
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text('{"files": {}}')


@pytest.mark.parametrize("newest", [None, "step-00000003"])
def test_the_killed_run_must_have_left_the_checkpoint_in_the_middle(tmp_path: Path, newest: str | None) -> None:
    if newest is not None:
        finished(tmp_path / "checkpoints" / newest)
    with pytest.raises(DemoError, match="instead of step-00000002"):
        start_again(FakeRun(output=tmp_path), STEPS)


def test_only_the_steps_after_the_checkpoint_count_as_done_again(tmp_path: Path) -> None:
    finished(tmp_path / "checkpoints" / "step-00000002")
    lines = "".join(f'{{"step": {step}, "loss": 1.0, "grad_norm": 1.0}}\n' for step in range(1, 5))
    assert sorted(start_again(FakeRun(output=tmp_path, lines=lines), STEPS)) == [3, 4]


# -- report ------------------------------------------------------------------------------------------------------------


def test_the_summary_has_results_pictures_and_times() -> None:
    report = Report(pictures=[Path("out/losses.png")], seconds={"Train": 61.4, "Draw": 2.2})
    report.check("losses", "equal", True)
    report.check("accuracy", "12 %", False)
    assert str(report).splitlines() == [
        "Results",
        "  ok      losses    equal",
        "  FAILED  accuracy  12 %",
        "Pictures",
        "  out/losses.png",
        "Time",
        "     61 s  Train",
        "      2 s  Draw",
        "     64 s  in all",
    ]
    assert report.failures == ["accuracy: 12 %"]


def test_parts_are_counted_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=iter([1.0, 3.5, 10.0, 10.25]).__next__)
    monkeypatch.setattr("examples.demo.report.time", clock)
    report = Report()
    with report.part("One"):
        pass
    with report.part("Two"):
        pass
    assert [*report.seconds.items()] == [("One", 2.5), ("Two", 0.25)]
