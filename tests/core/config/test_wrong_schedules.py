"""Weights that change, wrongly written: each with the place and the cure that its message must name.

A row is (document, line, column, path in the document, what is said, the cure).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from energon_lite.config import load_metadataset
from energon_lite.errors import ConfigError

Row = tuple[str, int, int, str, str, str]

# fmt: off
SCHEDULES: dict[str, Row] = {
    "schedule with an unknown kind": (
        "splits:\n  train:\n    blend:\n    - path: digits\n      weight: {liner: {0: 1}}\n",
        5, 16, "splits.train.blend[0].weight.liner", "unknown key 'liner'", "did you mean 'linear'?",
    ),
    "schedule in another library's manner": (
        "splits:\n  train:\n    blend:\n    - path: digits\n      weight: {from: 1, to: 2}\n",
        5, 16, "splits.train.blend[0].weight.from", "unknown key 'from'", "{linear: {0: 0.9, 1_000_000: 0.1}}",
    ),
    "schedule with two kinds": (
        "splits:\n  train:\n    blend:\n    - path: digits\n      weight: {step: {0: 1}, linear: {0: 1}}\n",
        5, 30, "splits.train.blend[0].weight.linear", "'linear' beside 'step'", "write it like",
    ),
    "schedule with positions beside a kind": (
        "splits:\n  train:\n    blend:\n    - path: digits\n      weight: {step: {0: 1}, 10: 1}\n",
        5, 30, "splits.train.blend[0].weight.10", "'10' beside 'step'", "write it like",
    ),
    "schedule without positions": (
        "splits:\n  train:\n    blend:\n    - path: digits\n      weight: {linear: {}}\n",
        5, 24, "splits.train.blend[0].weight.linear", "has no positions", "add '0:'",
    ),
    "schedule that is empty": (
        "splits:\n  train:\n    blend:\n    - path: digits\n      weight: {}\n",
        5, 15, "splits.train.blend[0].weight", "has no positions", "add '0:'",
    ),
    "schedule that is a number": (
        "splits:\n  train:\n    blend:\n    - path: digits\n      weight: {linear: 1}\n",
        5, 24, "splits.train.blend[0].weight.linear", "expected a mapping", "",
    ),
    "schedule that does not start at zero": (
        "splits:\n  train:\n    blend:\n    - path: digits\n      weight:\n        1000: 1\n",
        6, 9, "splits.train.blend[0].weight.1000", "what the weight is at the start", "add '0: 0'",
    ),
    "schedule whose positions decrease": (
        "splits:\n  train:\n    blend:\n    - path: digits\n      weight: {0: 1, 2000: 2, 1000: 1}\n",
        5, 31, "splits.train.blend[0].weight.1000", "expected a position above 2000; found 1000", "sort the positions",
    ),
    "schedule with a position twice": (
        "splits:\n  train:\n    blend:\n    - path: digits\n      weight: {0: 1, 1000: 2, 1e3: 1}\n",
        5, 31, "splits.train.blend[0].weight.1e3", "positions have to increase", "each of them once",
    ),
    "schedule with half a sample": (
        "splits:\n  train:\n    blend:\n    - path: digits\n      weight: {0: 1, 10.5: 2}\n",
        5, 22, "splits.train.blend[0].weight[\"10.5\"]", "'10.5' is not a position", "1_000_000 or 1e6",
    ),
    "schedule beyond the end of all positions": (
        "splits:\n  train:\n    blend:\n    - path: digits\n      weight: {0: 1, 1e19: 2}\n",
        5, 22, "splits.train.blend[0].weight.1e19", "below 2**62", "1_000_000 or 1e6",
    ),
    "schedule with a negative position": (
        "splits:\n  train:\n    blend:\n    - path: digits\n      weight: {-5: 1}\n",
        5, 16, "splits.train.blend[0].weight.-5", "unknown key '-5'", "write it like",
    ),
    "schedule with a negative weight": (
        "splits:\n  train:\n    blend:\n    - path: digits\n      weight: {0: 1, 10: -2}\n",
        5, 26, "splits.train.blend[0].weight.10", "a weight is below zero", "write 0",
    ),
    "schedule with a weight in quotes": (
        "splits:\n  train:\n    blend:\n    - path: digits\n      weight: {0: '1'}\n",
        5, 19, "splits.train.blend[0].weight.0", "expected a number; found text '1'", "remove the quotes",
    ),
    "schedule with a tiny weight": (
        "splits:\n  train:\n    blend:\n    - path: digits\n      weight: {0: 1, 10: 1e-200}\n",
        5, 26, "splits.train.blend[0].weight.10", "out of range", "nearer to 1",
    ),
    "schedule that is zero": (
        "splits:\n  train:\n    blend:\n    - path: digits\n      weight: {0: 0, 10: 0}\n",
        5, 15, "splits.train.blend[0].weight", "zero at all positions", "remove the entry",
    ),
    "all schedules zero at one position": (
        "splits:\n  train:\n    blend:\n    - {path: digits, weight: {0: 1, 100: 0}}\n"
        "    - {path: prose, weight: {0: 0, 200: 1}}\n",
        3, 5, "splits.train.blend", "zero at position 100", "before the others end",
    ),
    "all schedules zero just before a position": (
        "splits:\n  train:\n    blend:\n    - {path: digits, weight: {linear: {0: 1, 100: 0}}}\n"
        "    - {path: prose, weight: {0: 0, 100: 1}}\n",
        3, 5, "splits.train.blend", "zero at position 100, or just before it", "before the others end",
    ),
    "schedule of repetitions": (
        "splits:\n  train:\n    blend_epochized:\n    - {path: digits, repetitions: {0: 1, 10: 2}}\n",
        4, 35, "splits.train.blend_epochized[0].repetitions", "repetitions cannot change", "use 'blend'",
    ),
    "schedule in a blend by repetitions": (
        "splits:\n  train:\n    blend_epochized:\n    - {path: digits, weight: {0: 1, 10: 2}}\n",
        4, 22, "splits.train.blend_epochized[0].weight", "'weight' belongs to blend", "use 'repetitions'",
    ),
}
# fmt: on


@pytest.mark.parametrize("row", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_wrong_schedule(row: Row, write: Callable[..., Path]) -> None:
    text, line, column, at, what, fix = row
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_metadataset(path, split_part="train")
    error = caught.value
    assert (error.file, error.line, error.column, error.at) == (str(path), line, column, at)
    assert what in error.what and fix in (error.fix or "")
