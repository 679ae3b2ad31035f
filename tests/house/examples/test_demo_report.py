from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.demo.report import Report


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
