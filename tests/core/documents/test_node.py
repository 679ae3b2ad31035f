"""Nodes of documents; and documents into dataclasses: what each annotation takes, and what is said of what it does not
take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from energon_lite.documents import Node, from_plain, load_yaml, read
from energon_lite.errors import ConfigError, UsageError, require


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
        ("number", "nan", "a number", "text 'nan'", "write a number"),
        ("number", "-inf", "a number", "text '-inf'", "write a number"),
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
        ({"a": {True: 2}}, "a", "a key is not text"),
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


# -- into dataclasses


def even(node: Node) -> int:
    if node.integer() % 2:
        raise node.error("an odd number", "add one", expected="an even number")
    return node.integer()


@dataclass(frozen=True)
class Inner:
    size: int = 1

    def __post_init__(self) -> None:
        require(self.size > 0, "size is below 1", "inner.size", "give at least 1")
        if self.size > 100:
            raise UsageError("size is above 100", fix="give less")


@dataclass(frozen=True)
class Outer:
    name: Annotated[str, "the name of it"]
    share: float | None = None
    flag: bool = False
    kind: Literal["wide", "deep"] = "wide"
    inner: Inner = Inner()
    pair: tuple[int, float] = (1, 2.0)
    words: tuple[str, ...] = ()
    parts: dict[str, Annotated[list[str], "parts"]] | None = None
    free: Mapping[str, Any] | None = None
    count: Annotated[int | None, even] = 0
    place: Node | None = None


def test_each_annotation() -> None:
    document = {
        "name": "a",
        "share": 1,
        "flag": True,
        "kind": "deep",
        "inner": {"size": 3},
        "pair": [1, 2],
        "words": ["x"],
        "parts": {"p": ["q"]},
        "free": {"a": [1, {"b": None}]},
        "count": 4,
        "place": 5,
    }
    outer = read(from_plain(document, "<dict>"), Outer)
    assert (outer.name, outer.share, outer.flag, outer.kind, outer.inner) == ("a", 1.0, True, "deep", Inner(3))
    assert (outer.pair, outer.words, outer.parts) == ((1, 2.0), ("x",), {"p": ["q"]})
    assert (outer.free, outer.count) == ({"a": [1, {"b": None}]}, 4)
    assert outer.place is not None and outer.place.path == "place"
    assert isinstance(outer.share, float) and isinstance(outer.pair[1], float)


def test_defaults_and_null() -> None:
    document = {"name": "a", "share": None, "count": None, "parts": None, "free": None}
    assert read(from_plain(document, "<dict>"), Outer) == Outer("a", count=None)


@pytest.mark.parametrize(
    ("entry", "at", "said", "fix"),
    [
        ({"name": 3}, "name", "expected the name of it; found the number 3", "put it into quotes"),
        ({"flag": None}, "flag", "expected true or false; found nothing", "write true or false"),
        ({"kind": "dep"}, "kind", "expected one of wide, deep", "did you mean 'deep'?"),
        ({"kind": ["deep"]}, "kind", "expected one of wide, deep", "use one of"),
        ({"inner": 3}, "inner", "expected a mapping with the key size", ""),
        ({"inner": {"sise": 3}}, "inner.sise", "unknown key 'sise'", "did you mean 'size'?"),
        ({"inner": {"size": 0}}, "inner.size", "size is below 1", "give at least 1"),
        ({"inner": {"size": 101}}, "inner", "size is above 100", "give less"),
        ({"pair": [1]}, "pair", "expected a list of 2", ""),
        ({"pair": [1, "2"]}, "pair[1]", "expected a number", "remove the quotes"),
        ({"words": "x"}, "words", "expected a list of entries", "after '- '"),
        ({"words": ["x", 1]}, "words[1]", "expected text", "put it into quotes"),
        ({"parts": {"p": "q"}}, "parts.p", "expected a list of parts", "after '- '"),
        ({"free": [1]}, "free", "expected a mapping", ""),
        ({"count": 3}, "count", "an odd number; expected an even number", "add one"),
        ({"cuont": 3}, "cuont", "unknown key 'cuont'", "did you mean 'count'?"),
    ],
)
def test_wrong_entries(entry: dict[str, Any], at: str, said: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(from_plain({"name": "a"} | entry, "<dict>"), Outer)
    assert caught.value.at == at
    assert said in str(caught.value) and fix in (caught.value.fix or "")


def test_a_check_of_the_class_is_shown_at_its_key(tmp_path: Path) -> None:
    path = tmp_path / "doc.yaml"
    path.write_text("name: a\ninner:\n  size: -5\n")
    with pytest.raises(ConfigError, match="size is below 1") as caught:
        read(load_yaml(path), Outer)
    assert (caught.value.line, caught.value.column, caught.value.at) == (3, 9, "inner.size")


def test_keys_that_are_not_read_and_fields_that_are_no_keys() -> None:
    node = from_plain({"size": 2, "comment": [1]}, "<dict>")
    assert read(node, Inner, ignored={"comment"}) == Inner(2)
    with pytest.raises(ConfigError, match="unknown key 'size'"):
        read(node, Inner, ignored={"comment"}, without={"size"})
    assert read(from_plain({}, "<dict>"), Inner, size=7) == Inner(7)


@pytest.mark.parametrize("annotation", [int | str, set[int], complex])
def test_a_field_that_no_document_can_fill(annotation: Any) -> None:
    cls = make_dataclass("Odd", [("field", annotation)])
    with pytest.raises(UsageError, match="a field cannot be read from a document"):
        read(from_plain({"field": 1}, "<dict>"), cls)
