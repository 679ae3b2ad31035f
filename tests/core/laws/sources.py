"""Random compositions of small data sets, as a metadataset document and as the plain list of their samples' names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from energon_lite import TextSample
from energon_lite.extras.energon import build_filter_index
from energon_lite.storage.index.columns import write_column
from tests.core.laws.token_data import length_of
from tests.testing import CRUDE_YAML, TEXT_YAML, metadataset, write_dataset

#: Data sets by their tags, and how many samples they have. Those of "x" are crude ones.
SIZES = {"a": 3, "b": 5, "c": 8, "d": 13, "e": 21, "f": 34, "x": 13}
#: The data set that is joined to "e": every second key of it.
PARTNER = "p"


def images_of(index: int) -> int:
    return index * 7 % 5 if index % 3 else 0


def columns(size: int) -> dict[str, np.ndarray]:
    """Numbers of the samples of a data set."""
    index = np.arange(size)
    images = np.array([images_of(one) for one in range(size)])
    return {
        "length": np.array([length_of(one) for one in range(size)]),
        "images": images,
        "squared_patches": images * (index * 31 % 97) ** 2,
        "loss_tokens": index * 13 % 40,
    }


def join_texts(one: TextSample, two: TextSample | None) -> TextSample:
    """The joiner of all joins."""
    return TextSample.derive_from(one, text=f"{one.text}&{'-' if two is None else two.text}")


def key(tag: str, index: int) -> str:
    return f"{tag}{index:02d}"


def write_data(root: Path) -> Path:
    """Write all data sets below a folder."""
    for tag, size in SIZES.items():
        names = [key(tag, number) for number in range(size)]
        _write(root / tag, [(name, name) for name in names], CRUDE_YAML if tag == "x" else TEXT_YAML)
        for name, values in columns(size).items():
            write_column(root / tag, name, values)
        build_filter_index(root / tag, "some", np.flatnonzero(np.arange(size) % 3 != 1))
    _write(root / PARTNER, [(key("e", index), f"p{index}") for index in range(0, SIZES["e"], 2)])
    _write(root / "notes", [(key("x", index), f"note {index}") for index in range(SIZES["x"])])
    return root


def _write(folder: Path, samples: Sequence[tuple[str, str]], document: str = TEXT_YAML) -> None:
    """A prepared folder of two shards, the first one larger."""
    cut, stored = -(-2 * len(samples) // 3), [(name, {"txt": text.encode()}) for name, text in samples]
    write_dataset(folder, {"0.tar": stored[:cut], "1.tar": stored[cut:]}, dataset_yaml=document)


@dataclass(frozen=True)
class Source:
    """A composition of data sets.

    Args:
        document: of the metadataset.
        leaves: the names of the samples of each data set in it, in their order.
        what: in a few words.
        ends: a pass over it ends.
    """

    document: dict[str, Any]
    leaves: tuple[tuple[str, ...], ...]
    what: str
    ends: bool


def random_source(random: Random, root: Path, *, columns: bool) -> Source:
    """A source.

    Args:
        columns: each of its samples has measured columns.
    """
    count = random.choice([1, 1, 2, 3])
    found = [_reference(random, root, columns=columns) for _ in range(count)]
    kind = random.choice(["blend", "blend", "blend_epochized"]) if count > 1 else "path"
    split: dict[str, Any]
    if kind == "path":
        split = found[0].reference
    elif kind == "blend":
        weights: list[Any] = [random.choice([1, 2, 0.3]) for _ in found]
        split = {"blend": [one.reference | {"weight": w} for one, w in zip(found, weights, strict=True)]}
        if not any(one.is_join for one in found) and random.random() < 0.3:
            split["blend_weight_unit"] = "tokens"
        elif random.random() < 0.3:
            split["blend"][0]["weight"] = {0: 3, 16: 1} if random.random() < 0.5 else {"linear": {0: 3, 40: 1}}
        kind = f"blend {split}"
    else:
        times = [random.choice([1, 2, 0.5, 1.5]) for _ in found]
        split = {kind: [one.reference | {"repetitions": n} for one, n in zip(found, times, strict=True)]}
        kind += f" {times}"
    if random.random() < 0.2 and count > 1:  # a blend in a file of its own
        inner = root / f"blend-{random.getrandbits(60)}.yaml"
        inner.write_text(json.dumps(metadataset(split)))
        split, kind = {"path": str(inner)}, f"{kind} in a file"
    return Source(
        metadataset(split),
        tuple(one.names for one in found),
        f"{kind} of {[one.what for one in found]}".replace(str(root), ""),
        ends=count == 1 or kind.startswith("blend_epochized"),
    )


@dataclass(frozen=True)
class _Reference:
    reference: dict[str, Any]
    names: tuple[str, ...]
    what: str
    is_join: bool = False


def _reference(random: Random, root: Path, *, columns: bool) -> _Reference:
    """A data set, a part of one, or a join."""
    kind = random.choice(["whole", "whole", "whole", "subset", "filter", "index", "both", "crude", "join"])
    if kind == "join" and not columns:
        nonmatch = random.choice(["skip", "none"])
        members = [{"path": str(root / "e")}, {"path": str(root / PARTNER), "nonmatch": nonmatch}]
        join = {"join": members, "joiner": {"__module__": __name__, "__function__": "join_texts"}}
        matched = range(0, SIZES["e"], 2) if nonmatch == "skip" else range(SIZES["e"])
        return _Reference(join, tuple(key("e", index) for index in matched), f"join {nonmatch}", is_join=True)
    tag = "x" if kind == "crude" else random.choice([tag for tag in SIZES if tag != "x"])
    reference: dict[str, Any] = {"path": str(root / tag)}
    if tag == "x":
        reference["aux"] = {"notes": str(root / "notes")}
    start, stop, most = 0, SIZES[tag], 60
    if kind in ("subset", "both"):
        bounds: list[Any] = random.choice([["0%", "50%"], ["30%", "100%"], [1, "end"], [0, 2]])
        reference["subset"] = {"range": bounds}
        start, stop = (_cut(bound, stop) for bound in bounds)
    if kind in ("filter", "both"):
        most = random.choice([20, 40])
        reference["filter"] = f"length <= {most}"
    elif kind == "index":
        reference["filter"] = "some"
    kept = [index for index in range(start, stop) if kind != "index" or index % 3 != 1]
    names = tuple(key(tag, index) for index in kept if length_of(index) <= most)
    return _Reference(reference, names, f"{tag} {reference.get('subset', '')} {reference.get('filter', '')}".strip())


def _cut(bound: Any, size: int) -> int:
    if bound == "end":
        return size
    return int(size * (int(bound[:-1]) / 100)) if isinstance(bound, str) else int(bound)
