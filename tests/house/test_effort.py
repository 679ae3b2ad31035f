from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.testing import examples, load_profile

TESTS = Path(__file__).parents[1]


def test_numbers_of_examples_follow_the_profile() -> None:
    said = re.compile(r"max_examples=\d")
    fixed = [str(path) for path in TESTS.rglob("*.py") if said.search(path.read_text())]
    assert fixed == [], "write max_examples=examples(...)"


def test_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        for profile, count in (("default", 80), ("check", 40), ("full", 200), ("nightly", 4000)):
            monkeypatch.setenv("HYPOTHESIS_PROFILE", profile)
            load_profile()
            assert (examples(200), examples(0)) == (count, 1)
    finally:
        monkeypatch.undo()
        load_profile()
