from __future__ import annotations

from pathlib import Path

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


def test_parts_are_counted_and_timed() -> None:
    report = Report()
    with report.part("One"):
        pass
    with report.part("Two"):
        pass
    assert list(report.seconds) == ["One", "Two"]
    assert all(0 <= seconds < 5 for seconds in report.seconds.values())
