from __future__ import annotations

from pathlib import Path

import pytest

from examples.demo.errors import DemoError
from examples.demo.steps import Steps

DIGITS = Path(__file__).parents[3] / "examples" / "configs" / "digits.yaml"


def config(path: Path, **train: int) -> Path:
    lines = ["data: {path: x}", "train:", *(f"  {key}: {value}" for key, value in train.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_rank_is_killed_some_steps_after_the_last_checkpoint_before_the_end(tmp_path: Path) -> None:
    steps = Steps.of(config(tmp_path / "c.yaml", steps=400, save_every=100, keep=2))
    assert steps == Steps(total=400, resume=300, kill=333)
    assert steps.checkpoint == "step-00000300"


def test_the_example_fits_the_demo() -> None:
    steps = Steps.of(DIGITS)
    assert steps.resume < steps.kill < steps.total


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({"steps": 400, "save_every": 0}, "saves too seldom"),
        ({"steps": 400, "save_every": 300}, "saves too seldom"),
        ({"steps": 4, "save_every": 2}, "saves too seldom"),
        ({"steps": 400, "save_every": 100, "keep": 1}, "set train.keep to 2"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, train: dict[str, int], says: str) -> None:
    with pytest.raises(DemoError, match=says):
        Steps.of(config(tmp_path / "c.yaml", **train))
