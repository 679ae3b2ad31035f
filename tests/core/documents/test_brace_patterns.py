from __future__ import annotations

import re
from itertools import accumulate, islice

import pytest
from braceexpand import braceexpand
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.documents.paths import MAX_NAMES, _count_names, expand_braces
from energon_lite.errors import UsageError
from energon_lite.storage.prepare_choices import divide_by_patterns

PIECES = [
    "{",
    "}",
    ",",
    "..",
    "a",
    "f",
    "Z",
    "7",
    "12",
    "003",
    "-2",
    "\\",
    "{0..3}",
    "{a..c}",
    "{x,y}",
    "{5..1..2}",
    "/",
]


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_the_names_are_those_of_bash_and_their_number_is_known_before(pattern: str) -> None:
    plain = re.sub(r"\\.", "__", pattern)
    try:
        expected = list(islice(braceexpand(pattern), MAX_NAMES + 1))
    except ValueError:
        expected = []
    if not expected or min(accumulate((char == "{") - (char == "}") for char in plain or "x")) < 0:
        with pytest.raises(ValueError, match="do not match"):
            expand_braces(pattern)
        return
    if len(expected) > MAX_NAMES:
        with pytest.raises(ValueError, match="which are too many"):
            expand_braces(pattern)
        return
    assert expand_braces(pattern) == expected
    if "\\" not in pattern:
        assert _count_names(pattern) == len(expected)
    if len(expected) > 1:
        with pytest.raises(ValueError, match="stand for"):
            expand_braces(pattern, 1)


def test_a_split_by_a_pattern_for_too_many_names() -> None:
    with pytest.raises(UsageError, match="its braces stand for 100,000,000,000 names, which are too many"):
        divide_by_patterns(["a.tar"], [("train", "{0..99999999999}")])
