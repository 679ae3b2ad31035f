from __future__ import annotations

from pathlib import Path

import pytest

from examples.demo.run import Echo, Run


def test_the_command_is_what_one_would_type() -> None:
    run = Run(Path("c.yaml"), Path("out"), tp=2, overrides=["train.steps=3"])
    assert " ".join(run.command) == (
        "torchrun --standalone --nproc-per-node 4 examples/train.py c.yaml output=out mesh.tp=2 train.steps=3"
    )


def test_the_trainers_own_lines_are_shown_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    echo = Echo()
    echo.show(b"W1121 08:47:22.745 torch: a warning\n10:00:01 step 1 of ")
    echo.show(b"2: loss 3.0\n[rank1]: Traceback\n10:00:02 resumed from x\n10:00")
    echo.close()
    assert capsys.readouterr().out == "  10:00:01 step 1 of 2: loss 3.0\n  10:00:02 resumed from x\n"


def test_on_a_terminal_progress_takes_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    echo = Echo()
    echo.show(b"10:00:01 step 1 of 2: a\n10:00:02 step 2 of 2: b\n10:00:03 saved\n10:00:04 step 3 of 3: c\n")
    echo.close()
    shown = capsys.readouterr().out
    # What is left to see of each line is what came after the last return to its start.
    seen = [line.rpartition("\r\x1b[K")[2].strip() for line in shown.split("\n")]
    assert seen == ["10:00:02 step 2 of 2: b", "10:00:03 saved", "10:00:04 step 3 of 3: c", ""]


def test_the_end_of_a_log(tmp_path: Path) -> None:
    run = Run(Path("c.yaml"), tmp_path, tp=1)
    run.log.write_bytes(b"".join(b"%d \xff\n" % n for n in range(9)))
    assert run.tail(2) == "7 \ufffd\n8 \ufffd\n"
