from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.documents import Node, from_plain, load_yaml
from energon_lite.errors import ConfigError

# What can stand in YAML at all: no control characters, no surrogates.
TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc", "Cn", "Co"), exclude_characters="\ufeff\u2028\u2029"))
SCALARS = (
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False) | TEXT
)
DOCUMENTS = st.dictionaries(
    TEXT.filter(lambda key: key != "<<"),
    st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4)),
    max_size=5,
)


STYLES = [
    partial(json.dumps, ensure_ascii=False),
    partial(yaml.safe_dump, allow_unicode=True, sort_keys=False, default_style='"', width=10_000),
]


@given(DOCUMENTS, st.sampled_from(STYLES))
def test_a_dict_and_the_yaml_of_it_are_the_same(document: dict[str, Any], dump: Callable[[Any], str]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "doc.yaml")
        path.write_text(dump(document), encoding="utf-8")
        read, given_as_dict = load_yaml(path), from_plain(document, "<dict>")

    def compare(a: Node, b: Node) -> None:
        assert a.path == b.path
        assert a.line is not None and b.line is None
        assert type(a.value) is type(b.value)
        if isinstance(a.value, dict):
            assert list(a.value) == list(b.value)
            for key in a.value:
                compare(a.value[key], b.value[key])
        elif isinstance(a.value, list):
            assert len(a.value) == len(b.value)
            for left, right in zip(a.value, b.value, strict=True):
                compare(left, right)
        else:
            assert a.value == b.value

    compare(read, given_as_dict)
    assert read.plain() == document


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12), ("-3", -3), ("010", 10), ("1_000", 1000), ("1.5", 1.5), ("1e-3", 0.001), ("2E5", 2e5), (".5", 0.5),
        ("true", True), ("False", False), ("yes", True), ("No", False), ("null", None), ("~", None),
        ("on", "on"), ("off", "off"), ("y", "y"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("0x1f", "0x1f"),
        ("1.2.3", "1.2.3"), ("'12'", "12"), ('"yes"', "yes"), ("a b", "a b"), ("s{000..003}.tar", "s{000..003}.tar"),
    ],
)  # fmt: skip
def test_scalars_are_read_as_energon_reads_them(text: str, value: object, write: Callable[..., Path]) -> None:
    from megatron.energon.eyaml import load_yaml as energon_load_yaml

    document = f"key: {text}\n"
    ours = load_yaml(write(document)).plain()["key"]
    assert (type(ours), ours) == (type(value), value)
    theirs = energon_load_yaml(document.encode())["key"]
    assert (type(theirs), theirs) == (type(value), value)


def test_infinity_and_nan_are_numbers(write: Callable[..., Path]) -> None:
    values = load_yaml(write("[.inf, -.Inf, +.INF, .nan]")).plain()
    assert values[:3] == [math.inf, -math.inf, math.inf]
    assert math.isnan(values[3])


def test_every_node_knows_its_place(write: Callable[..., Path]) -> None:
    node = load_yaml(write("splits:\n  train:\n    blend:\n      - path: a\n      - path: b\n"))
    second = node.value["splits"].value["train"].value["blend"].value[1].value["path"]
    assert (second.value, second.line, second.column) == ("b", 5, 15)
    assert (second.key_line, second.key_column) == (5, 9)
    assert second.path == "splits.train.blend[1].path"
    assert second.origin == f"{node.file}:5"


def test_keys_are_text_and_odd_ones_are_quoted_in_paths(write: Callable[..., Path]) -> None:
    node = load_yaml(write("1: {a.b: {yes: 2}}"))
    assert node.plain() == {"1": {"a.b": {"yes": 2}}}
    assert node.value["1"].value["a.b"].value["yes"].path == '1["a.b"].yes'


def test_anchors_and_aliases_work(write: Callable[..., Path]) -> None:
    node = load_yaml(write("a: &x {p: 1}\nb: [*x, *x]\n"))
    assert node.plain() == {"a": {"p": 1}, "b": [{"p": 1}, {"p": 1}]}
    assert node.value["b"].value[1].value["p"].path == "b[1].p"


def test_aliases_do_not_nest_deeper_than_documents_may(write: Callable[..., Path]) -> None:
    node = load_yaml(write(f"a: &x {'[' * 49}1{']' * 49}\nb: {'[' * 49}*x{']' * 49}\n"))
    assert str(node.plain()["b"]).count("[") == 98
    with pytest.raises(ConfigError, match="nested too deeply") as caught:
        load_yaml(write(f"a: &x {'[' * 50}1{']' * 50}\nb: {'[' * 50}*x{']' * 50}\n"))
    assert caught.value.line == 1


def test_a_byte_order_mark_is_skipped(write: Callable[..., Path]) -> None:
    assert load_yaml(write(b"\xef\xbb\xbfa: 1\n")).plain() == {"a": 1}


@pytest.mark.parametrize(
    ("text", "message", "known"),
    [
        (b"a: 1\nbc: \xff\n", "not UTF-8", {"line": 2, "column": 5}),
        ("a: \x07\n", "not valid YAML", {"fix": "remove characters that are not text"}),
        ("a: !!int many\n", "does not fit its tag", {"line": 1, "at": "a"}),
        ("a: !!python/name:os.system ''\n", "tags that make objects", {}),
        ("a: !mine {a: 1}\n", "tags that make objects", {}),
        ("a: !!set {a}\n", "tags that make objects", {}),
        ("a: !!binary aGk=\n", "tags that make objects", {}),
        ('{\n "a": [1,\n}', "not valid JSON", {"line": 3}),
        ('{"a": 1, "a": 2}', "the key 'a' appears twice", {}),
        ("a: &x b\n*x : 1\n", "an alias", {"line": 2, "column": 1}),
    ],
)
def test_mistakes_are_located(
    text: str | bytes, message: str, known: dict[str, Any], write: Callable[..., Path]
) -> None:
    path = write(text, "doc.json" if text[:1] == "{" else "doc.yaml")
    with pytest.raises(ConfigError, match=message) as caught:
        load_yaml(path)
    assert {name: getattr(caught.value, name) for name in known} == known


def test_json_is_read_by_its_own_rules(write: Callable[..., Path]) -> None:
    assert load_yaml(write('{\n\t"a": ["\\ud83d\\ude00", 1e3]}', "doc.json")).plain() == {"a": ["\U0001f600", 1000.0]}


def test_an_empty_list_may_be_said_again(write: Callable[..., Path]) -> None:
    assert load_yaml(write("a: []\nb: 1\na: [2]\n")).plain() == {"a": [2], "b": 1}
    for first in ("[1]", "{}", "''", "0"):
        with pytest.raises(ConfigError, match="the key 'a' appears twice"):
            load_yaml(write(f"a: {first}\na: [2]\n"))


def test_a_missing_file_and_a_folder_are_config_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read the document") as caught:
            load_yaml(path)
        assert caught.value.file == str(path)


def test_without_libyaml_it_is_the_same(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("a: &x [1e-3, yes, 'no']\nb: {c: *x}\n")
    fast = load_yaml(path)
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    slow = load_yaml(path)
    assert slow.plain() == fast.plain() == {"a": [0.001, True, "no"], "b": {"c": [0.001, True, "no"]}}
    assert slow.value["b"].line == fast.value["b"].line == 2
    with pytest.raises(ConfigError, match="merge keys"):
        load_yaml(write("<<: {a: 1}\n"))
