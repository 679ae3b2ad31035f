"""Functions that a data set brings along."""

from __future__ import annotations

from pathlib import Path

import pytest

from energon_lite.errors import ConfigError
from energon_lite.trust import load_function


def test_a_function_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def load(sample):\n    return sample + 1\n\ndef other(sample):\n    return 0\n")
    assert load_function(str(tmp_path), "own.py", "load")(1) == 2
    assert load_function(str(tmp_path), "own.py:other", "load")(1) == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone.py", "there is no 'gone.py'"),
        ("own.py:gone", "there is no function 'gone'"),
        ("own.py:number", "there is no function 'number'"),
        ("own.py", "there is no function 'load'"),
    ],
)
def test_what_is_not_there(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "own.py").write_text("number = 3\n")
    with pytest.raises(ConfigError, match=words):
        load_function(str(tmp_path), name, "load")
