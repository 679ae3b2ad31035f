"""Documents into dataclasses: what each annotation takes, and what is said of what it does not take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from energon_lite.documents import Node, from_plain, load_yaml, read
from energon_lite.errors import ConfigError, UsageError, require


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
def test_wrong_values(entry: dict[str, Any], at: str, said: str, fix: str) -> None:
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
