"""Plain data as typed objects, checked; beside Energon's own parser."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import megatron.energon.typed_converter as theirs
import pytest

from energon_lite.errors import ConfigError
from energon_lite.extras.energon.compat.documents import JsonParser, to_json_object
from energon_lite.extras.energon.epath import EPath


class Size(NamedTuple):
    width: int
    height: int = 7


@dataclasses.dataclass
class Leaf:
    name: str
    weight: float = 1.0
    size: Size | None = None
    tags: list[str] = dataclasses.field(default_factory=list)
    made: int = dataclasses.field(default=0, init=False)


NESTED = {"name": "a", "weight": 2, "size": {"width": 3}, "tags": ["x"]}
GOOD: list[tuple[Any, Any]] = [
    (True, int),
    (1, float),
    (None, None),
    (None, Any),
    ("a", Literal["a", "b"]),
    ({"a": [1]}, dict[str, list[int]]),
    ([1, 2], set[int]),
    ([], list[int]),
    ([1, 2, 3], tuple[int, ...]),
    ({"a": 1}, dict),
    ({"width": 4}, Size),
    ([{"width": 4, "height": 5}], list[Size]),
    ("/tmp/x", EPath),
]
BAD: list[tuple[Any, Any, str]] = [
    ("1", int, "root"),
    (1.5, int, "root"),
    ("c", Literal["a", "b"], "root"),
    ({"a": [1, "2"]}, dict[str, list[int]], "root.a.1"),
    ([1, 1], set[int], "root"),
    ([1], tuple[int, int], "root"),
    ("x", list[int], "root"),
    ("x", Size, "root"),
    ({}, Size, "needs 'width'"),
    ({"width": 1, "depth": 2}, Size, "has no 'depth'"),
    ({**NESTED, "size": {"width": "wide"}}, Leaf, "root.size.width"),
    ({**NESTED, "made": 3}, Leaf, "has no 'made'"),
]


@pytest.mark.parametrize(("data", "kind"), GOOD)
def test_it_makes_what_energon_makes(data: Any, kind: Any) -> None:
    made = JsonParser().raw_to_typed(data, kind)
    if kind is not EPath:
        assert made == theirs.JsonParser().raw_to_typed(data, type(None) if kind is None else kind)
    else:
        assert made == EPath(data)


def test_records_inside_of_each_other() -> None:
    assert JsonParser().raw_to_typed(NESTED, Leaf) == Leaf("a", 2, Size(3, 7), ["x"])
    assert JsonParser().raw_to_typed([1, "a"], tuple[int, str]) == (1, "a")
    assert JsonParser(strict=False).raw_to_typed({"width": 1, "depth": 2}, Size) == Size(1)


@pytest.mark.parametrize(("data", "kind", "match"), BAD)
def test_what_is_not_of_its_type(data: Any, kind: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        JsonParser().raw_to_typed(data, kind)
    if kind is not Leaf:  # 7.4.1 does not read annotations that are text
        with pytest.raises(theirs.JsonValueError):
            theirs.JsonParser().raw_to_typed(data, kind)


def test_nothing_is_imported() -> None:
    names = {"__module__": "no_such_module", "__class__": "Evil"}
    assert JsonParser().raw_to_typed(names, Any) == names
    with pytest.raises(ConfigError, match="names code: no_such_module"):
        JsonParser().raw_to_typed([names], list[Any], allow_imports=True)


def test_a_call() -> None:
    def weigh(leaf: Leaf, times: int = 2) -> float:
        return leaf.weight * times

    parser = JsonParser()
    assert parser.safe_call_function({"leaf": NESTED}, weigh) == 4 == parser.safe_call_function([NESTED, 2], weigh)
    wrong: list[Any] = [{}, {"leaf": NESTED, "more": 1}, [NESTED, 2, 3], {"leaf": NESTED, "times": "x"}]
    for arguments in wrong:
        with pytest.raises(ConfigError):
            parser.safe_call_function(arguments, weigh)


def test_back_to_plain_data() -> None:
    assert to_json_object({"a": {1}, "b": Leaf("x"), "c": Size(1)}) == {
        "a": [1],
        "b": {"name": "x", "weight": 1.0, "size": None, "tags": []},
        "c": {"width": 1, "height": 7},
    }
    assert to_json_object([Leaf, weight_of]) == [
        {"__module__": __name__, "__class__": "Leaf"},
        {"__module__": __name__, "__function__": "weight_of"},
    ]


def weight_of(leaf: Leaf) -> float:
    return leaf.weight
