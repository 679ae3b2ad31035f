"""Documents with one to three mistakes, or malicious changes, made of a number."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

__all__ = ["mutated"]

#: What nobody should write.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**70, -(2**70), 0.5, 1e300, float("inf"), float("nan")),
    *("", " ", "x", "50%", "1e9%", "-5%", "end", "train", "none", "skip", "\u0000", "ü\u2028", "a" * 5000),
    *("../../secret.txt", "/etc/passwd", "file:///etc/passwd", "../outside.yaml", "meta.yaml", "memory://none/x.yaml"),
    *("memory://none/x.jsonl", "simplecache::memory://a", "text/", "text", "crude", "lines.jsonl", "~", ".", ".."),
    *("os:system", "secret.py:run", "../../secret.py:run", "json[a][b]", "txt,json", "json[", "[", ",", "txt[0][0]"),
    *(
        "{0..99999999}",
        "a{0..9}{0..9}{0..9}{0..9}{0..9}{0..9}{0..9}{0..9}.tar",
        "{a,{b,{c}}}",
        "part-{0..1}.tar",
        "part-0.tar/k0",
    ),
    *(
        "antigravity",
        "os",
        "subprocess",
        "megatron.energon",
        "energon_lite",
        "TextSample",
        "Sample",
        "MetadatasetV2",
        "CrudeWebdataset",
    ),
    *(
        [],
        {},
        [[]],
        [{}],
        {"a": 1},
        ["train"],
        [0, "end"],
        ["0%", "50%"],
        {"range": [0, 1]},
        {"path": "text"},
        [{"path": "text"}],
    ),
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


def mutated(document: Any, seed: int) -> str:
    """The text of a document, changed; most of the time it is YAML still."""
    dice = random.Random(seed)
    tree = copy.deepcopy(document)
    for _ in range(dice.choice([1, 1, 2, 3])):
        _change(tree, dice)
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
    letters = "\"'{}[]:,-&*!%@`|>#? \n\t\\0aZ\u0000é"
    way = dice.choice(["insert", "delete", "cut", "twice"])
    if way == "insert":
        return text[:place] + "".join(dice.choice(letters) for _ in range(dice.choice([1, 3]))) + text[place:]
    if way == "delete":
        return text[:place] + text[place + dice.choice([1, 1, 5]) :]
    return text[:place] if way == "cut" else text[:place] + text[max(0, place - 40) :]
