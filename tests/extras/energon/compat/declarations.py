"""Declarations as a user might write them, made of a number; and the data sets that they refer to."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.extras.energon.compat.conftest import image_bytes
from tests.testing import write_tar

#: What ``msc://`` calls this machine; newer versions of its client have another name for it.
LOCAL = "default"
with suppress(ImportError):
    from multistorageclient.config import RESERVED_POSIX_PROFILE_NAME as LOCAL

#: Samples of a data set, and shards.
SAMPLES, SHARDS = 24, 6
#: Each leaves as many samples of 24, 16, 12 or 8, in both libraries, whatever it stands in.
_RANGES = (["0%", "50%"], ["25%", "75%"], ["50%", "100%"], ["0%", "75%"])
_MODULE = {"__module__": "megatron.energon"}
_CRUDE_SET = _MODULE | {"__class__": "CrudeWebdataset"}
_BOUND = {"split_part": "some", "split_config": "other.yaml"}
_NUMBERS = list(range(SAMPLES))


def _text(number: int) -> dict[str, bytes]:
    return {"txt": f"text {number}".encode(), "json": json.dumps({"n": number, "words": [f"w{number}"]}).encode()}


def _typed(name: str, **fields: str) -> dict[str, Any]:
    return {"sample_type": _MODULE | {"__class__": name}, "field_map": fields}


#: By name: keys, parts, and what dataset.yaml says.
_SETS: dict[str, tuple[list[int], Callable[[int], dict[str, bytes]], dict[str, Any]]] = {
    "text": (_NUMBERS, _text, _typed("TextSample", text="txt") | {"subflavors": {"own": 1}}),
    "image": (
        [5 * n % SAMPLES for n in range(SAMPLES)],
        lambda n: {"png": image_bytes(n, "png")},
        _typed("ImageSample", image="png,jpg"),
    ),
    "label": (
        list(range(0, 2 * SAMPLES, 2)),
        lambda n: {"png": image_bytes(n, "png"), "cls": str(n).encode()},
        _typed("ImageClassificationSample", image="png", label="cls"),
    ),
    "crude": (_NUMBERS[::-1], _text, _CRUDE_SET | {"part_filter": ["json"], "subflavors": {"own": 2}}),
    # Its own document says which split is read, and out of which file.
    "bound": (_NUMBERS, _text, _CRUDE_SET | {"part_filter": ["json", "txt"]} | _BOUND),
    "older": (_NUMBERS, _text, _MODULE | {"__class__": "TextWebdataset", "field_map": {"text": "json[words][0]"}}),
}


def make_data(root: Path, tools: Any) -> Path:
    """The data sets, prepared by Energon, and metadatasets beside them."""
    for name, (keys, parts, document) in _SETS.items():
        for shard in range(SHARDS):
            own = keys[shard * SAMPLES // SHARDS : (shard + 1) * SAMPLES // SHARDS]
            write_tar(root / name / f"part-{shard}.tar", [(f"k{key:03d}", parts(key)) for key in own])
        tools.energon_prepare(root / name, "--split-ratio", "4,2,0", "--skip-dataset-yaml")
        meta = root / name / ".nv-meta"
        (meta / "dataset.yaml").write_text(json.dumps(document))
        (meta / "bound.yaml").write_text(json.dumps(document | _BOUND))
        first = keys[0]
        backwards = [f"part-{n}.tar" for n in (5, 4, 2, 1)]
        other = {"split_parts": {"some": ["part-{3..5}.tar", "part-0.tar"], "train": backwards}}
        exclude = {"exclude": [f"part-5.tar/k{keys[-1]:03d}", f"part-0.tar/k{first:03d}", "part-4.tar"]}
        (meta / "other.yaml").write_text(json.dumps(other | exclude))
        exclude["exclude"].pop()  # Energon reads excluded shards in joins
        (meta / "joined.yaml").write_text(json.dumps(other | exclude))
        whole = {"split_parts": {part: ["part-{0..5}.tar"] for part in ("train", "val")}}
        (meta / "whole.yaml").write_text(json.dumps(whole))
    (root / "lines.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(SAMPLES)))
    tools.energon_prepare(root / "lines.jsonl")
    turns = ({"n": n, "turns": [{"from": "ü", "value": f"{n}"}] * (n % 3), "none": None} for n in range(SAMPLES))
    lines = (json.dumps(turn, ensure_ascii=n % 2 == 0) + "\n" for n, turn in enumerate(turns))
    (root / "chats.jsonl").write_text("".join(lines))
    tools.energon_prepare(root / "chats.jsonl")
    (root / "notes" / "deep").mkdir(parents=True)
    for number in range(SAMPLES):
        (root / "notes" / f"{number}.txt").write_text(f"note {number}")
        (root / "notes" / "deep" / f"{number}.json").write_text(json.dumps([number]))
    old = {"datasets": [{"path": "text", "weight": 2.0}, {"path": "crude", "subflavors": {"who": "x"}}]}
    (root / "old.yaml").write_text(json.dumps({"splits": {"train": old, "val": old}}))
    inner = {"path": "crude", "subflavors": {"inner": 1, "who": "inner"}}
    (root / "inner.yaml").write_text(json.dumps(_v2({"train": inner, "val": {"path": "crude", "split_part": "train"}})))
    return root


def _v2(splits: dict[str, Any]) -> dict[str, Any]:
    return _MODULE | {"__class__": "MetadatasetV2", "splits": splits}


def declaration(seed: int, splits: tuple[str, ...] = ("train", "val")) -> dict[str, Any]:
    """A metadataset with one split, whose name and content come from the seed."""
    return _Writer(random.Random(seed)).document(splits[seed % len(splits)], seed)


#: The data sets whose samples are crude; with a label ``cook``, the cooker of that name makes them.
_CRUDE = ("crude", "bound", "lines.jsonl", "chats.jsonl")
#: By cooker: what it takes, as a document names it. ``ROOT`` stands for the folder of everything.
COOKERS: dict[str, dict[str, tuple[str, ...]]] = {
    "notes": {"notes": ("filesystem://notes", "filesystem://./notes", "filesystem://ROOT/notes")},
    "pictures": {"pictures": ("image", "./image", "ROOT/label", f"msc://{LOCAL}ROOT/image")},
    "own": {},
    "all": {"notes": ("filesystem://notes",), "pictures": ("image", "label")},
}

#: None with ``bound``: of a member whose own document names its split Energon takes samples of other keys.
_JOINS = [
    tuple(names.split())
    for names in ("text image", "image text", "text label", "crude image text", "label crude", "older text")
]


def written(document: dict[str, Any], root: Path) -> str:
    """The text of a declaration about the data sets in a folder."""
    return json.dumps(document).replace("ROOT", str(root))


def cookers(lib: Any) -> list[Any]:
    """The same cookers for both libraries; what they find beside a sample stands under ``found``."""

    @lib.edataclass
    class Cooked(lib.Sample):
        crude: dict[str, Any]

    def cooked(sample: dict[str, Any], **found: Any) -> Cooked:
        return Cooked(**lib.basic_sample_keys(sample), crude=dict(sample) | {"found": found})

    @lib.stateless
    def notes(sample: dict[str, Any], notes: Any) -> Cooked:
        number = sample["json"]["n"]
        return cooked(sample, text=notes.get(f"{number}.txt", sample), deep=notes.get(f"deep/{number}.json"))

    @lib.stateless
    def pictures(sample: dict[str, Any], pictures: Any) -> Cooked:
        return cooked(sample, picture=pictures.get(f"k{2 * (sample['json']['n'] // 2):03d}.png", sample))

    @lib.stateless
    @lib.cooker(need_primary=True)
    def own(sample: dict[str, Any], primary: Any) -> Cooked:
        key = sample["__key__"]
        other = f"{int(key) // 2}" if key.isdigit() else f"k{int(key[1:]) // 2:03d}"
        return cooked(sample, own=primary.get(".json"), other=primary.get(f"{other}.json", sample))

    @lib.stateless
    @lib.cooker(need_primary=True)
    def everything(sample: dict[str, Any], primary: Any, notes: Any, pictures: Any) -> Cooked:
        number = sample["json"]["n"]
        picture = pictures.get(f"k{2 * (number // 2):03d}.png", sample)
        note = notes.get(f"{number}.txt", sample)
        return cooked(sample, note=note, picture=picture, own=primary.get(".json", sample))

    named = {"notes": notes, "pictures": pictures, "own": own, "all": everything}
    chosen = [lib.Cooker(cook, has_subflavors={"cook": name}) for name, cook in named.items()]
    return [*chosen, lib.Cooker(lib.stateless(cooked))]


class _Writer:
    """Writes declarations.

    Args:
        dice: all choices come from it.
    """

    def __init__(self, dice: random.Random):
        self.dice = dice
        self.epochized = False
        self.joined: set[tuple[str, ...]] = set()

    def document(self, split: str, seed: int) -> dict[str, Any]:
        self.epochized = seed % 4 == 2
        kind = ("path", "blend", "blend_epochized", "join")[seed % 4]
        if kind == "path":
            return _v2({split: self.reference()})
        if kind == "join":
            return _v2({split: self.join()})
        share = "weight" if kind == "blend" else "repetitions"
        entries = []
        for number in range(self.dice.choice([1, 2, 3])):
            entry = self.join() if number == 0 or self.chance(0.4) else self.reference(nested=kind == "blend")
            if self.chance(0.7):
                entry[share] = self.dice.choice([1, 2, 3] if kind == "blend_epochized" else [0.5, 1, 2.25])
            entries.append(entry)
        node: dict[str, Any] = {kind: entries}
        if self.chance(0.3) and not any(self.is_absolute(entry) for entry in entries):
            node["subset"] = {"range": self.dice.choice(_RANGES)}
        return _v2({split: node})

    def chance(self, share: float) -> bool:
        return self.dice.random() < share

    def is_absolute(self, entry: dict[str, Any]) -> bool:
        return "subset" in entry and not isinstance(entry["subset"]["range"][0], str)

    def reference(self, nested: bool = True) -> dict[str, Any]:
        """A data set, or another document."""
        names = [*_SETS, "crude", "lines.jsonl", "chats.jsonl", "inner.yaml", *(["old.yaml"] if nested else [])]
        path = self.dice.choice(names)
        entry: dict[str, Any] = {"path": path}
        if path in _CRUDE and self.chance(0.6):
            cook = self.dice.choice([*COOKERS])
            entry["subflavors"] = {"cook": cook}
            if COOKERS[cook]:
                entry["aux"] = {name: self.dice.choice(choices) for name, choices in COOKERS[cook].items()}
        if self.chance(0.3) and not path.endswith("yaml"):
            entry["split_part"] = "train"
        if path in _SETS and self.chance(0.5):
            other = {"split_config": "other.yaml", "split_part": "train"}
            entry |= self.dice.choice([other, {"dataset_config": "bound.yaml"}])
        self.common(entry, absolute=not path.endswith("yaml"))
        if path.endswith("jsonl"):  # Energon cannot choose a cooker for one without any
            entry.setdefault("subflavors", {"cook": "plain"})
        if self.chance(0.15):
            entry["path"] = f"msc://{LOCAL}ROOT/{path}"
        return entry

    def join(self) -> dict[str, Any]:
        """Data sets that are joined."""
        # Energon has one index for two joins of the same data sets in a document, whatever their splits are.
        names = self.dice.choice([names for names in _JOINS if names not in self.joined])
        self.joined.add(names)
        members = [self.member(name, number) for number, name in enumerate(names)]
        by_name = self.chance(0.5)
        joiner = {"__module__": "joiners_of_tests", "__function__": "together"}
        if names == ("image", "text") and not by_name and members[1]["nonmatch"] != "none" and self.chance(0.8):
            joiner = _MODULE | {"__class__": "OCRSample"}
        entry: dict[str, Any] = {"join": members, "joiner": joiner}
        if by_name:
            entry["join"] = dict(zip(names, members, strict=True))
        if self.chance(0.2):
            entry["split_part"] = "train"
        self.common(entry, absolute=False)
        return entry

    def member(self, name: str, number: int) -> dict[str, Any]:
        entry: dict[str, Any] = {"path": name}
        if number:
            entry["nonmatch"] = self.dice.choice(["skip", "none", "none", "error"])
            entry |= {"split_config": "whole.yaml"}  # Energon fails where a match is in another split
        elif self.chance(0.3):
            entry |= {"split_config": "joined.yaml", "split_part": "train"}
        if self.chance(0.3):
            entry["subflavors"] = {"who": name, "member": number}
        return entry

    def common(self, entry: dict[str, Any], absolute: bool) -> None:
        """What each kind of entry may say."""
        if self.chance(0.3):
            entry["subset"] = {"range": self.dice.choice([*_RANGES, [1, 7], [0, "end"]] if absolute else _RANGES)}
        if self.chance(0.4):
            outer = {"outer": self.dice.choice(["a", 1, True]), "who": "outer"}
            entry["subflavors"] = outer | entry.get("subflavors", {})
        if self.chance(0.2):  # with 2, a sample may come twice in one epoch, and not in the other
            entry["shuffle_over_epochs_multiplier"] = 1 if self.epochized else self.dice.choice([2, 3, -1, None])


JOINERS = """
import dataclasses

def _plain(sample):
    if sample is None:
        return None
    if isinstance(sample, dict):
        return {k: v for k, v in sample.items() if k[:2] != "__"} | {"labels": sample["__subflavors__"]}
    found = {f.name: getattr(sample, f.name) for f in dataclasses.fields(sample) if not f.name.startswith("__")}
    return found | {"type": type(sample).__name__, "labels": sample.__subflavors__}

def together(*samples, **named):
    first = samples[0] if samples else next(iter(named.values()))
    base = ("__key__", "__restore_key__", "__subflavors__", "__sources__")
    base = {name: first[name] if isinstance(first, dict) else getattr(first, name) for name in base}
    base["__subflavors__"] = dict(base["__subflavors__"])
    by_name = {name: _plain(one) for name, one in named.items()}
    return base | {"listed": [_plain(one) for one in samples], "named": by_name}
"""
