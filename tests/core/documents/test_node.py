from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest

from energon_lite.documents import Node, from_plain
from energon_lite.errors import ConfigError


def node(value: Any) -> Node:
    return from_plain({"x": value}, "<dict>").value["x"]


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("string", "a"), ("number", 1), ("number", -2.5), ("integer", 7), ("integer", 2**62 - 1), ("boolean", False),
    ],
)  # fmt: skip
def test_right_scalars(method: str, value: object) -> None:
    assert getattr(node(value), method)() == value


@pytest.mark.parametrize(
    ("method", "value", "expected", "found", "fix"),
    [
        ("string", 3, "text", "the number 3", "put it into quotes"),
        ("string", True, "text", "the truth value true", "put it into quotes"),
        ("string", None, "text", "nothing (null)", None),
        ("string", "", "text, not empty", "text ''", None),
        ("string", {}, "text", "an empty mapping", None),
        ("number", "1.5", "a number", "text '1.5'", "remove the quotes"),
        ("number", "many", "a number", "text 'many'", None),
        ("number", True, "a number", "the truth value true", None),
        ("number", float("inf"), "a finite number", "the number inf", None),
        ("number", float("nan"), "a finite number", "the number nan", None),
        ("number", 10**400, "a finite number", None, None),
        ("integer", 1.0, "a whole number", "the number 1.0", None),
        ("integer", "1", "a whole number", "text '1'", "remove the quotes"),
        ("integer", False, "a whole number", "the truth value false", None),
        ("boolean", 1, "true or false", "the number 1", None),
        ("boolean", "yes", "true or false", "text 'yes'", "remove the quotes"),
        ("sequence", "a", "a list of entries", "text 'a'", "write a list: each entry on a line of its own, after '- '"),
        ("sequence", {"a": 1}, "a list of entries", "a mapping with the keys a", None),
        ("entries", [1], "a mapping", "a list of 1", None),
        ("mapping", [], "a mapping with the keys ", "an empty list", None),
    ],
)
def test_wrong_values(method: str, value: object, expected: str, found: str | None, fix: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        getattr(node(value), method)()
    error = caught.value
    assert (error.at, error.expected) == ("x", expected) and found in (None, error.found) and fix in (None, error.fix)


def test_mapping_gives_the_entries() -> None:
    entries = node({"a": 1, "b": 2}).mapping(required={"a"}, optional={"b", "c"})
    assert {key: entry.value for key, entry in entries.items()} == {"a": 1, "b": 2}
    assert entries["b"].path == "x.b"


def test_an_unknown_key_comes_before_a_missing_one() -> None:
    """The misspelt key is the reason that the right one is missing; without one like it, the keys are listed."""
    for wrong, near, fix in (
        ("pathh", "path", "did you mean 'path'?"),
        ("qqq", None, "remove it, or use the keys path, weight"),
    ):
        with pytest.raises(ConfigError, match=f"unknown key '{wrong}'") as caught:
            node({wrong: 1}).mapping(required={"path"}, optional={"weight"})
        assert (caught.value.suggestion, caught.value.fix) == (near, fix)
        assert caught.value.expected == "the keys path, weight"


def test_plain_objects_of_other_kinds_are_converted() -> None:
    document = {"p": PurePosixPath("a/b"), "i": np.int64(3), "f": np.float32(0.5), "t": (1, 2)}
    plain = from_plain(document, "<dict>").plain()
    assert plain == {"p": "a/b", "i": 3, "f": 0.5, "t": [1, 2]}
    assert [type(value) for value in plain.values()] == [str, int, float, list]


@pytest.mark.parametrize(
    ("value", "at", "message"),
    [
        ({"a": [1, {2, 3}]}, "a[1]", "set is not a value that a document can hold"),
        ({"a": {"b": b"x"}}, "a.b", "bytes is not a value"),
        ({"a": {(1,): 2}}, "a", "a key is not text"),
    ],
)
def test_objects_that_no_document_can_hold(value: object, at: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        from_plain(value, "<dict>")
    assert (caught.value.file, caught.value.at) == ("<dict>", at)
    assert caught.value.fix


def test_an_object_that_contains_itself() -> None:
    value: dict[str, Any] = {}
    value["a"] = [value]
    with pytest.raises(ConfigError, match="contains itself"):
        from_plain(value, "<dict>")


def test_origin_without_a_file_is_the_path() -> None:
    assert node(1).origin == "<dict> at x"
    assert from_plain({}, "<dict>").origin == "<dict>"


def test_long_values_are_shortened_in_messages() -> None:
    assert len(node("a" * 1000).describe()) < 80
