from __future__ import annotations

import pickle

import pytest

from energon_lite.errors import ConfigError, FieldAccessError
from energon_lite.storage.samples.field_map import compile_field_map

SAMPLE = {"jpg": "image", "json": {"text": ["a", "b"], "n": {"7": "seven"}}, "seg.png": "mask", "mp": {"k": 1}}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("jpg", "image"),
        ("seg.png", "mask"),
        ("json[text]", ["a", "b"]),
        ("json[text][1]", "b"),
        ("json[text][-2]", "a"),
        ("json[n][7]", "seven"),
        ("png,jpg", "image"),
        ("jpg, png", "image"),
        ("json[title],json[text][5],json[text][0]", "a"),
        ("jpg[0],mp[k]", 1),
    ],
)
def test_access(expression: str, expected: object) -> None:
    assert compile_field_map({"field": expression}).apply(SAMPLE) == {"field": expected}


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("jgp", r"field 'f': the sample has no part 'jgp'[\s\S]*did you mean 'jpg'\? it has: 'jpg', 'json', 'seg.png'"),
        ("png,webp", r"no part 'webp' \(nor is there png\)"),
        ("json[txet]", r"json has no key 'txet'[\s\S]*did you mean 'text'"),
        ("json[text][2]", r"json\[text\] has 2 elements, there is no \[2\]"),
        ("json[text][one]", r"'one' must be a number"),
        ("jpg[0]", r"jpg is of type str, so \[0\] cannot be taken"),
    ],
)  # fmt: skip
def test_what_is_not_there(expression: str, message: str) -> None:
    with pytest.raises(FieldAccessError, match=message):
        compile_field_map({"f": expression}).apply(SAMPLE)


@pytest.mark.parametrize(
    "expression", ["", ",", "jpg,", "json[", "json[]", "json]x", "[a]", "json[a]b", "a[b", 3, None]
)
def test_what_cannot_be_parsed(expression: object) -> None:
    with pytest.raises(ConfigError, match=r"not a field access[\s\S]*field_map\.image") as caught:
        compile_field_map({"image": expression})  # type: ignore[dict-item]
    assert repr(expression) in str(caught.value)


def test_parts_are_those_of_all_alternatives() -> None:
    field_map = compile_field_map({"image": "jpg,png", "caption": "json[text][0]", "boxes": "json[boxes]"})
    assert field_map.parts == {"jpg", "png", "json"}
    assert pickle.loads(pickle.dumps(field_map)) == field_map
