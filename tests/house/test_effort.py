from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing import examples

TESTS = Path(__file__).parents[1]


def test_numbers_of_examples_follow_the_profile() -> None:
    said = re.compile(r"max_examples=\d")
    fixed = [str(path) for path in TESTS.rglob("*.py") if said.search(path.read_text())]
    assert fixed == [], "write max_examples=examples(...)"


@pytest.mark.parametrize(("profile", "count"), [("default", 200), ("check", 40), ("nightly", 4000)])
def test_profiles(profile: str, count: int) -> None:
    code = "from tests.testing import examples, load_profile; load_profile(); print(examples(200), examples(1) >= 1)"
    environment = {**os.environ, "HYPOTHESIS_PROFILE": profile, "PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(count), "True"]


def test_there_is_always_one() -> None:
    assert examples(0) == 1
