"""Documents with mistakes, or malicious changes, that a seed makes: errors of ours, no import, no file from elsewhere,
no hang."""

from __future__ import annotations

import copy
import gc
import importlib
import json
import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from energon_lite import get_loader, get_val_dataset
from energon_lite.errors import ConfigError, EnergonLiteError
from tests.testing import ALONE, write_dataset

#: In the quick suite, and behind ``-m nightly``; and seconds that one may take.
QUICK, ALL, LONGEST = 500, 20_000, 10.0
V2 = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
TEXT = {"__module__": "megatron.energon", "__class__": "TextSample"}


def in_train(**split: Any) -> dict[str, Any]:
    return V2 | {"splits": {"train": split}}


METADATASETS: tuple[dict[str, Any], ...] = (
    in_train(
        blend=[
            {"path": "text", "weight": 2.5, "subset": {"range": ["0%", "50%"]}, "subflavors": {"a": 1}},
            {"path": "crude", "split_part": "train"},
            {"join": [{"path": "text"}, {"path": "text", "nonmatch": "skip"}], "joiner": TEXT, "weight": 1},
        ],
        subset={"range": ["0%", "100%"]},
    ),
    in_train(
        join={"one": {"path": "text", "split_config": "split.yaml"}, "two": {"path": "text", "nonmatch": "none"}},
        joiner={"__class__": "TextSample"},
        subset={"range": [0, "end"]},
        subflavors={"kind": "joined"},
        shuffle_over_epochs_multiplier=2,
    ),
    {"splits": {"train": {"blend_epochized": [{"path": "inner.yaml", "repetitions": 1.5}, {"path": "lines.jsonl"}]}}},
    {"splits": {"train": {"datasets": [{"path": "text", "weight": 1, "dataset_config": "dataset.yaml"}]}}},
    in_train(path="crude", aux={"pictures": "text", "files": "filesystem://text"}),
)
DATASET = {
    "sample_type": {"__module__": "megatron.energon", "__class__": "TextSample"},
    "field_map": {"text": "txt,json[text]"},
    "subflavors": {"own": [1, {"deep": None}]},
    "split_part": "train",
    "split_config": "split.yaml",
    "parallel_shard_iters": 2,
}
CRUDE = {**V2, "__class__": "CrudeWebdataset", "part_filter": ["json"], "subflavors": {"own": 2}}
SPLIT = {
    "split_parts": {"train": ["part-{0..1}.tar"], "val": ["part-1.tar"]},
    "exclude": ["part-0.tar/k0", "part-7.tar"],
}


#: What nobody should write.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**70, -(2**70), 0.5, 1e300, float("inf"), float("nan")),
    *("", " ", "x", "50%", "1e9%", "-5%", "end", "train", "none", "skip", "\u0000", "ü\u2028", "a" * 5000),
    *("../../secret.txt", "/etc/passwd", "file:///etc/passwd", "../outside.yaml", "meta.yaml", "memory://none/x.yaml"),
    *("memory://none/x.jsonl", "simplecache::memory://a", "text/", "text", "crude", "lines.jsonl", "~", ".", ".."),
    *("os:system", "secret.py:run", "../../secret.py:run", "json[a][b]", "txt,json", "json[", "[", ",", "txt[0][0]"),
    *("{0..99999999}", "a" + "{0..9}" * 8 + ".tar", "{a,{b,{c}}}", "part-{0..1}.tar", "part-0.tar/k0"),
    *("antigravity", "os", "subprocess", "megatron.energon", "energon_lite", "TextSample", "Sample"),
    *("MetadatasetV2", "CrudeWebdataset"),
    *([], {}, [[]], [{}], {"a": 1}, ["train"], [0, "end"], ["0%", "50%"]),
    *({"range": [0, 1]}, {"path": "text"}, [{"path": "text"}]),
    *({"__module__": "antigravity", "__class__": "geohash"}, {"__module__": "os", "__function__": "system"}),
    *({"__module__": "megatron.energon", "__class__": "OCRSample"}, {"from": 0, "at": {"0": 1}}),
)
#: Keys that mean something somewhere.
KEYS = (
    *("path", "join", "joiner", "nonmatch", "blend", "blend_epochized", "datasets", "weight", "repetitions", "subset"),
    *("range", "aux", "subflavors", "split_part", "split_config", "dataset_config", "shuffle_over_epochs_multiplier"),
    *("__module__", "__class__", "__function__", "splits", "train", "field_map", "sample_type", "sample_loader"),
    *("part_filter", "split_parts", "exclude", "parallel_shard_iters", "<<", "x", "0", "tags", "filter"),
)


#: Pieces of text that mean something to YAML, or nothing at all.
JUNK = (
    *"[]{}:,-?&*!|>'\"%@`#\n\t \\\0\x7f\x85\u2028",
    *("- ", ": ", "<<: *x\n", "*x", "&x ", "!!python/object:os.system ", "!!int ", "!!float x", "!!binary ", "!!set "),
    *("---\n", "...\n", "%YAML 9.9\n", "0x1f", "1e999", "-1", ".nan", "-.inf", "9" * 30, "9" * 5000),
    *("{0..999999999999}", "{a,b}" * 30, "../..", "/etc/passwd", "s3://a/b", "::"),
    *("[" * 300, "{" * 300, "- " * 300, "\ufffe", "é" * 100, "\udcff", "aZ\0"),
)


def mutated(document: Any, seed: int) -> str:
    """The text of a document, changed; most of the time it is YAML still."""
    dice = random.Random(seed)
    tree = copy.deepcopy(document)
    for _ in range(dice.choice([1, 1, 2, 3])):
        _change(tree, dice)
    if dice.random() < 0.3:
        text = yaml.safe_dump(tree, sort_keys=False)
    else:
        text = json.dumps(tree, indent=dice.choice([None, 1]))
    if dice.random() < 0.3:
        for _ in range(dice.choice([1, 2, 5])):
            text = _scratch(text, dice)
    return text


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """All entries of all lists and mappings, as the container and the key."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in entries for place in ((tree, key), *_places(value))]


def _change(tree: Any, dice: random.Random) -> None:
    places = _places(tree)
    if not places:
        return
    container, key = dice.choice(places)
    way = dice.choice(["value", "value", "value", "delete", "key", "swap", "copy", "wrap"])
    if way == "value":
        container[key] = copy.deepcopy(dice.choice(VALUES))
    elif way == "delete":
        del container[key]
    elif way == "wrap":
        container[key] = dice.choice([[container[key]], {dice.choice(KEYS): container[key]}])
    elif way == "copy":
        other, place = dice.choice(places)
        container[key] = copy.deepcopy(other[place])
    elif way == "swap":
        other, place = dice.choice(places)
        container[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(container[key])
    elif isinstance(container, dict):
        container[dice.choice(KEYS)] = container.pop(key) if dice.random() < 0.5 else copy.deepcopy(dice.choice(VALUES))
    else:
        container.insert(key, copy.deepcopy(dice.choice(VALUES)))


def _scratch(text: str, dice: random.Random) -> str:
    place = dice.randrange(len(text) + 1)
    piece = text[place : place + dice.randrange(1, 30)]
    way = dice.choice(["insert", "insert", "delete", "cut", "twice", "move"])
    if way == "insert":
        return text[:place] + "".join(dice.choice(JUNK) for _ in range(dice.choice([1, 3]))) + text[place:]
    if way == "delete":
        return text[:place] + text[place + dice.choice([1, 1, 5]) :]
    if way == "twice":
        return text[:place] + piece * dice.choice([2, 3, 1000]) + text[place + len(piece) :]
    if way == "move":
        rest = text[:place] + text[place + len(piece) :]
        to = dice.randrange(len(rest) + 1)
        return rest[:to] + piece + rest[to:]
    return text[:place]


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from energon_lite.storage.prepare import index_again  # noqa: F401 -- imported before it is watched

    top = tmp_path_factory.mktemp("house")
    (top / "secret.txt").write_text("secret")
    (top / "outside.yaml").write_text("splits: {train: {path: none}}")
    (top / "secret.py").write_text("import antigravity\ndef run(sample): return sample\n")
    room = top / "room"
    parts = {"txt": b"words", "json": b'{"text": "words"}'}
    shards = {f"part-{shard}.tar": [(f"k{n}", parts) for n in (2 * shard, 2 * shard + 1)] for shard in range(2)}
    for name in ("text", "crude"):
        write_dataset(room / name, shards)
    (room / "lines.jsonl").write_text('{"a": 1}\n')
    (room / "inner.yaml").write_text("splits: {train: {path: text}}")
    return room


@pytest.fixture
def watched(house: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The room, and a watch over it: imports by name, and files that are opened elsewhere, are errors; but for those
    of garbage and threads of earlier tests."""
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    # Between two tries of a store. Threads of earlier tests sleep a little, too, or they would take all of the time.
    monkeypatch.setattr("time.sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 1e-3)))
    logging.disable(logging.WARNING)
    _restore(house)
    _read(house / "meta.yaml")  # imports what is imported when it is needed
    allowed = (str(house) + os.sep, str(tmp_path) + os.sep, sys.prefix, sys.base_prefix, "/dev/null", "/proc/self")
    allowed += (str(Path(__file__).parents[3]) + os.sep,)
    # A reference may name a document or a data set anywhere; these are looked for.
    allowed += (str(house.parent / "outside.yaml"), str(house.parent / ".nv-meta"))
    seen: list[str] = []
    gc.collect()
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and watching and isinstance(arguments[0], str) and threading.get_ident() not in others:
            path = os.path.realpath(arguments[0])
            if not path.startswith(tuple(map(os.path.realpath, allowed))) and not path.startswith(allowed):
                seen.append(path)

    watching = [True]
    sys.addaudithook(watch)
    real = importlib.import_module

    def import_module(name: str, package: str | None = None) -> Any:
        if not name.startswith(("energon_lite", "fsspec", "webdataset")):
            seen.append(f"import {name}")
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", import_module)
    yield house
    watching.clear()
    logging.disable(logging.NOTSET)
    assert not seen
    assert not {"antigravity", "this"} & sys.modules.keys()


def _restore(room: Path) -> None:
    (room / "meta.yaml").write_text(json.dumps(METADATASETS[0]))
    for name, document in (("text", DATASET), ("crude", CRUDE)):
        (room / name / ".nv-meta/dataset.yaml").write_text(json.dumps(document))
        (room / name / ".nv-meta/split.yaml").write_text(json.dumps(SPLIT))


def _read(path: Path) -> str:
    """What comes of opening a document, and reading the first samples: a word."""
    try:
        dataset = get_val_dataset(path, split_part="train", worker_config=ALONE)
        for number, _ in enumerate(get_loader(dataset)):
            if number == 2:
                break
    except EnergonLiteError as error:
        assert str(error)
        assert not isinstance(error, ConfigError) or (error.fix and (error.file or error.at))
        return type(error).__name__
    return "read"


def _try(room: Path, seed: int) -> str:
    kind = seed % 8
    meta = room / "meta.yaml"
    if kind < 5:
        meta.write_text(mutated(METADATASETS[(seed // 8) % len(METADATASETS)], seed), errors="surrogatepass")
    else:
        meta.write_text(json.dumps(METADATASETS[(seed // 8) % 2]))
        name, document = [("text", DATASET), ("crude", CRUDE), ("split", SPLIT)][kind - 5]
        file = room / ("text/.nv-meta/split.yaml" if name == "split" else f"{name}/.nv-meta/dataset.yaml")
        file.write_text(mutated(document, seed), errors="surrogatepass")
    began = time.monotonic()
    word = _read(meta)
    assert time.monotonic() - began < LONGEST, seed
    if kind >= 5:
        _restore(room)
    return word


def test_mutated_documents(watched: Path) -> None:
    words = [_try(watched, seed) for seed in range(QUICK)]
    assert words.count("read") > QUICK // 20 and words.count("ConfigError") > QUICK // 4


@pytest.mark.nightly
@pytest.mark.parametrize("start", range(QUICK, ALL, QUICK))
def test_many_mutated_documents(watched: Path, start: int) -> None:
    words = Counter(_try(watched, seed) for seed in range(start, start + QUICK))
    assert words["read"] > QUICK // 20
