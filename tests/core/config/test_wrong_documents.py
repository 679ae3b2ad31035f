"""Wrong documents, each with the place and the cure that its message must name: ``wrong/*.yaml``. And documents that
mean harm: an error of ours, soon, and without much memory."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from energon_lite.config.dataset import load_dataset_config, load_own_splits, load_split_config
from energon_lite.config.metadataset import load_metadataset
from energon_lite.documents import from_plain, load_yaml
from energon_lite.errors import ConfigError, TrustError
from tests.core.config.conftest import Write
from tests.testing import nightly_but

#: Readers of the documents of each file.
READERS: dict[str, list[Callable[[Path], Any]]] = {
    "datasets": [load_dataset_config, partial(load_dataset_config, trust_code=True)],  # trust does not help
    "untrusted": [load_dataset_config],
    "trusted": [partial(load_dataset_config, trust_code=True)],
    "own_splits": [load_own_splits, load_dataset_config],
    "splits": [load_split_config],
    "metadatasets": [partial(load_metadataset, split_part="train")],
}
CASES = [
    pytest.param(kind, wrong, id=name)
    for kind in READERS
    for name, wrong in yaml.safe_load((Path(__file__).parent / "wrong" / f"{kind}.yaml").read_text()).items()
]


@pytest.mark.parametrize(("kind", "wrong"), CASES)
def test_wrong_document(kind: str, wrong: dict[str, Any], write: Write) -> None:
    check_wrong_document(kind, wrong, write)


def check_wrong_document(kind: str, wrong: dict[str, Any], write: Write) -> None:
    """Check what a message must say of a document, or of one beside it (``file``); FOLDER stands for theirs."""
    path = write(wrong["document"])
    for name, text in wrong.get("beside", {}).items():
        write(text, name)
    where = path.with_name(wrong.get("file", path.name))
    says = wrong["says"].replace("FOLDER", str(path.parent))
    for read in READERS[kind]:
        with pytest.raises(ConfigError) as caught:
            read(path)
        error, place = caught.value, wrong["place"]
        assert (error.file, f"{error.line}:{error.column}", error.at) == (str(where), place, wrong.get("path"))
        assert f"{where}:{place}" in str(error), "the place must be one that an editor can jump to"
        assert says in str(error) and wrong.get("fix", "") in (error.fix or "")
        if kind != "metadatasets":
            assert isinstance(error, TrustError) == (kind == "untrusted")


# -- documents that mean harm

NESTED = {
    "brackets": "[" * 50_000,
    "closed brackets": "[" * 50_000 + "]" * 50_000,
    "braces": "{" * 50_000,
    "maps": "{a: " * 20_000,
    "lists": "- " * 50_000,
    "keys": "? " * 50_000,
    "deep in a map": "a:\n  b: " + "[" * 50_000,
    "indented": "".join(f"{' ' * depth}a:\n" for depth in range(2000)),
}


@pytest.mark.parametrize("text", NESTED.values(), ids=NESTED)
def test_nesting_without_end(write: Write, text: str) -> None:
    with pytest.raises(ConfigError, match=r"nested too deeply[\s\S]*doc\.yaml:\d+:\d+"):
        load_yaml(write(text))


def test_nesting_by_aliases(write: Write) -> None:
    lines = ["a0: &a0 [x]", *(f"a{number}: &a{number} [*a{number - 1}]" for number in range(1, 2000))]
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_yaml(write("\n".join(lines)))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 500 + "]" * 500, "1" * 5000, "[" * 200])
def test_json_that_cannot_be_read(write: Write, text: str) -> None:
    with pytest.raises(ConfigError, match=r"nested too deeply|not valid JSON"):
        load_yaml(write(text, "doc.json"))


def test_a_dict_nested_without_end() -> None:
    value: Any = 1
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ConfigError, match="nested too deeply"):
        from_plain({"a": value}, "<dict>")
    while isinstance(value, list):  # or freeing it would be as deep
        value = value.pop()


def test_what_is_usual_is_not_too_deep(write: Write) -> None:
    assert load_yaml(write("[" * 50 + "]" * 50)).value is not None
    assert load_yaml(write("[" * 50 + "]" * 50, "doc.json")).value is not None


@pytest.mark.slow
@pytest.mark.parametrize("times", nightly_but({1}, [10, 2]))
def test_aliases_take_neither_time_nor_memory(write: Write, times: int) -> None:
    """A few hundred bytes that stand for a billion values."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * times)}]" for n in range(1, 31)]
    path = write("\n".join(lines))
    begin = time.process_time()
    with pytest.raises(ConfigError, match="aliases make the document larger"):
        load_yaml(path)
    assert time.process_time() - begin < 20


PATTERNS = [
    "a{0..99999999999}.tar",
    "{0..99999999999..2}",
    "{99999999999..0}",
    "{0..1000000}{0..1000000}",
    "{0..9999999}",
    "{a,b}" * 40,
    "{" + "{a,b}" * 40 + ",c}",
    "{x{0..99999999},y}",
    "{0..99999}" + "x" * 10_000,
    "{" * 10_000 + "}" * 10_000,
    "{a," * 10_000 + "b" + "}" * 10_000,
    "{0.." + "9" * 5000 + "}",
    "{" + "9" * 5000 + "..0}",
    "{0..9.." + "9" * 5000 + "}",
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=range(len(PATTERNS)))
@pytest.mark.parametrize("key", ["split_parts", "exclude"])
def test_braces_that_stand_for_too_much(write: Write, pattern: str, key: str) -> None:
    document = {"split_parts": {"train": [pattern if key == "split_parts" else "a.tar"]}}
    document |= {"exclude": [pattern]} if key == "exclude" else {}
    path = write(json.dumps(document), "split.yaml")
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=rf"braces of the pattern[\s\S]*split\.yaml:1:\d+ at {key}"):
            load_split_config(path)
        assert tracemalloc.get_traced_memory()[1] < 60 << 20
    finally:
        tracemalloc.stop()


def test_many_patterns_stand_for_too_much_together(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("energon_lite.config.dataset.MAX_NAMES", 1000)
    document = {"split_parts": {"train": [f"{n}-{{0..99}}.tar" for n in range(10)]}}
    assert len(load_split_config(write(json.dumps(document), "split.yaml")).shards("train")) == 1000
    document["split_parts"]["val"] = ["one"]
    with pytest.raises(ConfigError, match="braces of the pattern"):
        load_split_config(write(json.dumps(document), "split.yaml"))


@pytest.mark.parametrize("key", ["dataset_config", "split_config"])
@pytest.mark.parametrize("name", ["/etc/passwd", "../../../etc/passwd", "a/../../x.yaml", "..", "/"])
@pytest.mark.parametrize("kind", ["blend", "path", "datasets"])
def test_configurations_stay_in_the_folder_of_the_data_set(write: Write, key: str, name: str, kind: str) -> None:
    reference: Any = {"path": "digits", key: name}
    split = reference if kind == "path" else {kind: [reference]}
    with pytest.raises(ConfigError, match=rf"outside of the data set's \.nv-meta[\s\S]*{key}"):
        load_metadataset(write(json.dumps({"splits": {"train": split}})), split_part="train")


def test_other_configurations_of_the_folder_may_be_named(write: Write) -> None:
    entry = {"path": "digits", "dataset_config": "other.yaml", "split_config": "splits/a..b.yaml"}
    (leaf,) = load_metadataset(write(json.dumps({"splits": {"train": entry}})), split_part="train")
    assert (leaf.dataset_config, leaf.split_config) == ("other.yaml", "splits/a..b.yaml")
