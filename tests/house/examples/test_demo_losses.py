from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from examples.demo.errors import DemoError
from examples.demo.losses import Comparison, Metrics, compare, last_step, read_metrics, table


def run_of(*losses: float, first: int = 1) -> Metrics:
    return {first + i: {"step": first + i, "loss": loss, "grad_norm": 1.0} for i, loss in enumerate(losses)}


def write(path: Path, metrics: Metrics, rest: str = "") -> Path:
    path.write_text("".join(json.dumps(values) + "\n" for values in metrics.values()) + rest)
    return path


def test_metrics_keep_every_bit(tmp_path: Path) -> None:
    metrics = run_of(0.1 + 0.2, math.pi, 5e-324)
    assert read_metrics(write(tmp_path / "m.jsonl", metrics)) == metrics


@pytest.mark.parametrize(
    "rest",
    ['{"step": 3, "lo', '{"step": 3, "loss": 2.0, "grad_norm": 1.0}'],  # of the second, a number may lack digits
)
def test_a_line_that_a_kill_has_cut_is_left_out(tmp_path: Path, rest: str) -> None:
    path = write(tmp_path / "m.jsonl", run_of(3.0, 2.0), rest=rest)
    assert sorted(read_metrics(path)) == [1, 2] and last_step(path) == 2
    assert last_step(tmp_path / "missing.jsonl") == last_step(write(path, {})) == 0


def test_the_last_step_of_a_long_file_is_found_at_its_end(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", run_of(*[1.0] * 1000))
    assert path.stat().st_size > 3 * 4096
    assert last_step(path) == 1000


def test_equal_runs_are_identical() -> None:
    found = compare(run_of(3.0, 2.0, 1.0), run_of(2.0, 1.0, first=2), [2, 3])
    assert found == Comparison(first=2, last=3, steps=2, equal=2, largest=0.0, at=2)
    assert found.identical
    assert str(found) == "steps 2 to 3: all 2 equal to the last bit"


def test_one_last_bit_is_a_difference() -> None:
    found = compare(run_of(3.0, 2.0), run_of(3.0, math.nextafter(2.0, 3.0)), [1, 2])
    assert not found.identical
    assert (found.equal, found.largest, found.at) == (1, 2**-51, 2)
    assert str(found) == "steps 1 to 2: 1 of 2 equal to the last bit, largest difference 4.4e-16 at step 2"


def test_another_gradient_is_a_difference_even_if_the_loss_is_equal() -> None:
    other = run_of(3.0)
    other[1]["grad_norm"] = 2.0
    found = compare(run_of(3.0), other, [1])
    assert (found.identical, found.largest) == (False, 0.0)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (run_of(3.0), "Step 2 is missing"),
        ({**run_of(3.0), 2: {"step": 2, "loss": None, "grad_norm": 1.0}}, "loss of step 2 is None"),
        ({**run_of(3.0), 2: {"step": 2, "loss": math.nan, "grad_norm": 1.0}}, "loss of step 2 is nan"),
        ({**run_of(3.0), 2: {"step": 2, "loss": 2.0}}, "grad_norm of step 2 is None"),
    ],
)
def test_what_cannot_be_compared_is_an_error(other: dict[int, Any], says: str) -> None:
    with pytest.raises(DemoError, match=says):
        compare(run_of(3.0, 2.0), other, [1, 2])


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(DemoError, match="no steps"):
        compare(run_of(1.0), run_of(1.0), [])


def test_a_table_shows_all_digits_and_gaps() -> None:
    shown = table({"one": run_of(0.1 + 0.2), "two": run_of(2.0, first=2)}, [1, 2]).splitlines()
    assert [line.split() for line in shown] == [
        ["step", "one", "two"],
        ["1", "0.30000000000000004", "-"],
        ["2", "-", "2.0"],
    ]
    assert len({len(line) for line in shown}) == 1
