"""``examples/layout.py``: the group table, the picture and the layer map."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from energon_lite.errors import TopologyError
from examples.layout import main


def shown(*arguments: str) -> str:
    return CliRunner().invoke(main, arguments, catch_exceptions=False).output


def test_the_documented_example() -> None:
    text = shown("--world", "16", "--tp", "2", "--pp", "4")
    data = text.index("Data parallel, dp = 2")
    pipeline = text.index("Pipeline parallel, pp = 4")
    assert text[data:pipeline].split("\n")[1:9] == [
        f"    [g{a}, g{b}]" for a, b in [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    ]
    assert text[pipeline:].split("\n")[1:5] == [f"    [g{n}, g{n + 4}, g{n + 8}, g{n + 12}]" for n in range(4)]
    assert "Context parallel, cp = 1: each rank by itself" in text
    assert "dp 1  cp 0  | g2  g3  | g6  g7  | g10 g11 | g14 g15 |" in text


def test_order_and_context() -> None:
    text = shown("--world", "8", "--tp", "2", "--pp", "2", "--order", "tp-pp-dp")
    assert "    [g0, g2]\n    [g1, g3]\n    [g4, g6]\n    [g5, g7]" in text[text.index("Pipeline parallel") :]
    text = shown("--world", "8", "--tp", "2", "--cp", "2")
    assert "Data x context (gradients are summed here), dp-cp = 4\n    [g0, g2, g4, g6]\n    [g1, g3, g5, g7]" in text


def test_virtual_stages() -> None:
    text = shown("--world", "4", "--pp", "4", "--layers", "16", "--virtual", "2")
    assert "    stage 0 (g0): [1, 2] [9, 10]\n    stage 1 (g1): [3, 4] [11, 12]" in text


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(TopologyError, match="tp can be 1, 2, 4, 8, 16"):
        shown("--world", "16", "--tp", "3")


def test_as_json() -> None:
    said = json.loads(shown("--world", "4", "--tp", "2", "--layers", "4", "--json"))
    assert said["sizes"] == {"tp": 2, "cp": 1, "dp": 2, "pp": 1} and said["groups"]["dp"] == [[0, 2], [1, 3]]
    assert said["layers_of_stages"] == [[[0, 1, 2, 3]]]
