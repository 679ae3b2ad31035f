from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.demo.__main__ import check_close
from examples.demo.errors import DemoError
from examples.demo.losses import Metrics
from examples.demo.parts import check_equal, start_again, train, train_until_kill
from examples.demo.processes import Kill
from examples.demo.report import Report
from examples.demo.run import Run
from examples.demo.steps import Steps

STEPS = Steps(total=4, resume=2, kill=3)


def run_of(first: int, last: int, *, off: float = 0.0) -> Metrics:
    return {step: {"step": step, "loss": 5.0 / step + off, "grad_norm": 1.0} for step in range(first, last + 1)}


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


def test_a_run_that_fails_ends_the_demo_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"exit code 7.*\n.*the reason"):
        train(FakeRun(output=tmp_path, code=7), STEPS)


def test_a_run_that_ends_early_ends_the_demo(tmp_path: Path) -> None:
    line = '{"step": 3, "loss": 1.0, "grad_norm": 1.0}\n'
    with pytest.raises(DemoError, match="ends at step 3 instead of 4"):
        train(FakeRun(output=tmp_path, lines=line), STEPS)


def test_a_run_that_nobody_killed_ends_the_demo(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="before a rank could be killed"):
        train_until_kill(FakeRun(output=tmp_path, code=1), STEPS)


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
