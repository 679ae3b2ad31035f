"""What messages are made of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import energon_lite
from energon_lite.errors import UsageError, check_choice, counted, did_you_mean, listed


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


def test_one_thing_and_several() -> None:
    assert [counted(n, "shard") for n in (0, 1, 1200)] == ["0 shards", "1 shard", "1,200 shards"]
    assert counted(2, "micro-batch") == "2 micro-batches" and counted(3, "process") == "3 processes"


def test_commands_and_pages_count_in_words() -> None:
    """No report says "1 shards": a number before a plural goes through :func:`counted`."""
    nouns = "shards|samples|data sets|files|rows|lines|batches|ranks|records"
    plural = re.compile(rf"\{{[^{{}}!]*\}} (?:more )?(?:{nouns})\b(?!/)")
    package = Path(energon_lite.__file__).parent
    patterns = ("cli/*.py", "extras/**/*command.py", "extras/inspect/preview/*.py", "trainer/**/*command.py")
    files = {pattern: list(package.glob(pattern)) for pattern in patterns}
    texts = {str(path): path.read_text() for paths in files.values() for path in paths}
    found = [
        (path, one) for path, text in texts.items() for one in plural.findall(text) if not re.search(r":.*[fg]\}", one)
    ]
    assert all(files.values()) and not found
