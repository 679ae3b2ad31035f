"""What messages are made of."""

from __future__ import annotations

import pytest

from energon_lite.errors import UsageError, check_choice, did_you_mean, listed


def test_what_was_meant_or_else() -> None:
    assert did_you_mean("weigth", ["path", "weight"], "else") == "did you mean 'weight'?"
    assert did_you_mean("weigth", ["path", "weight"], "else", always=True) == "did you mean 'weight'? else"
    assert did_you_mean("colour", ["path", "weight"], "else", always=True) == "else"
    with pytest.raises(UsageError, match=r"give one of 'path', 'weight'"):
        check_choice("name", "colour", ["path", "weight"])


def test_names_and_how_many_more() -> None:
    assert listed([]) == "" and listed(["a", 1], 2) == "a, 1"
    assert listed("abc", 1) == "a and 2 more" == listed("a", 1, 3)
    assert listed("ab", 2, 1_002) == "a, b and 1,000 more"
