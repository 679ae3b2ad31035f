"""The same hooks in the installed Megatron-Energon and here: packs, groups, generators and skips make the same batches.

Where a chunk covers the whole pass, there is nothing that a chunk's end could change: batch by batch it must be equal.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def chance(text: str, salt: int, of: int) -> int:
    return zlib.crc32(f"{salt}:{text}".encode()) % of


def hooks(case: dict[str, Any], skip_sample: type[Exception]) -> dict[str, Any]:
    """The methods of a task encoder, for either library."""

    def maybe_skip(name: str, salt: int) -> None:
        if case.get("skips") and not chance(name, salt, case["skips"]):
            raise skip_sample()

    def one(self: Any, sample: Any) -> Any:
        maybe_skip(sample.text, 1)
        return {"name": sample.text, "__restore_key__": sample.__restore_key__}

    def several(self: Any, sample: Any) -> Iterator[Any]:
        maybe_skip(sample.text, 1)
        for part in range(chance(sample.text, 2, 4)):
            yield {"name": f"{sample.text}.{part}", "__restore_key__": sample.__restore_key__}
            maybe_skip(f"{sample.text}.{part}", 3)

    def late(self: Any, sample: Any) -> Any:
        maybe_skip(sample["name"], 4)
        return sample | {"name": sample["name"] + "!"}

    def select(self: Any, samples: list[Any]) -> list[list[Any]]:
        packs: list[list[Any]] = [[]]
        for sample in samples[::2] + samples[1::2]:
            if chance(sample["name"], 5, 8):
                packs[-1].append(sample)
            if chance(sample["name"], 6, 2):
                packs.append([])
        return packs

    def pack(self: Any, samples: list[Any]) -> Any:
        name = "+".join(sample["name"] for sample in samples)
        maybe_skip(name, 7)
        return {"name": name, "__restore_key__": samples[0]["__restore_key__"] if samples else ()}

    def packs(self: Any, samples: list[Any]) -> Iterator[Any]:
        packed = pack(self, samples)
        for part in range(chance(packed["name"], 8, 3)):
            yield packed | {"name": f"({packed['name']}).{part}"}

    def group(self: Any, sample: Any) -> Any:
        number = chance(sample["name"], 9, case["groups"])
        return f"group {number}", None if case["batch_size"] else 1 + number

    def batch(self: Any, samples: list[Any]) -> Any:
        names = [sample["name"] for sample in samples]
        maybe_skip(" ".join(names), 10)
        return {"names": names}

    def batches(self: Any, samples: list[Any]) -> Iterator[Any]:
        made = batch(self, samples)
        for part in range(chance(str(made["names"]), 11, 3)):
            yield made | {"part": part}

    def encoded(self: Any, made: Any) -> Iterator[Any]:
        for part in range(chance(str(made["names"]), 12, 3)):
            yield made | {"encoded": part}

    first = "preencode_sample" if case.get("packing") or case.get("late") else "encode_sample"
    found: dict[str, Any] = {first: several if case.get("yields") else one}
    found["batch"] = batches if case.get("batch_yields") else batch
    if case.get("late"):
        found["postencode_sample"] = late
    if case.get("packing"):
        found |= {"select_samples_to_pack": select, "pack_selected_samples": packs if case.get("pack_yields") else pack}
    if case.get("groups"):
        found["batch_group_criterion"] = group
    if case.get("encoded_yields"):
        found["encode_batch"] = encoded
    for name, hook in found.items():
        hook.__name__ = name  # Energon looks hooks up by it
    return found


CASES: dict[str, dict[str, Any]] = {
    "generator": {"yields": True, "batch_size": 4},
    "generator, single samples": {"yields": True, "batch_size": None},
    "generator that is cut short": {"yields": True, "batch_size": 4, "skips": 3},
    "batches yield": {"batch_size": 2, "batch_yields": True},
    "encoded batches yield": {"batch_size": 2, "encoded_yields": True},
    "everything yields": {"yields": True, "batch_size": 3, "batch_yields": True, "encoded_yields": True},
    "packing": {"packing": 6, "batch_size": 2},
    "packing, single packs": {"packing": 6, "batch_size": None},
    "packing with late encoding": {"packing": 4, "late": True, "batch_size": 1},
    "packing of generators, which yields": {"packing": 5, "yields": True, "pack_yields": True, "batch_size": 2},
    "packing with skips": {"packing": 4, "batch_size": 2, "skips": 4},
    "groups": {"groups": 3, "batch_size": 2},
    "groups with sizes": {"groups": 3, "batch_size": None},
    "groups of generators": {"groups": 2, "yields": True, "batch_size": 3},
    "groups of packs": {"packing": 5, "groups": 2, "batch_size": 2, "late": True},
    "groups whose batches yield": {"groups": 2, "batch_size": 2, "encoded_yields": True},
}


def energon(root: Path, case: dict[str, Any], train: int = 0) -> list[Any]:
    """The batches of a pass of validation, or so many epochs of training."""
    from megatron.energon import SkipSample, TaskEncoder, WorkerConfig, get_loader, get_train_dataset, get_val_dataset

    cls = type("Encoder", (TaskEncoder,), hooks(case, SkipSample))
    common = {
        "worker_config": WorkerConfig(rank=0, world_size=1, num_workers=0),
        "batch_size": case["batch_size"],
        "packing_buffer_size": case.get("packing"),
        "task_encoder": cls(),
    }
    if not train:
        return list(get_loader(get_val_dataset(str(root), **common)))
    dataset = get_train_dataset(
        str(root), shuffle_buffer_size=None, max_samples_per_sequence=None, repeat=False, **common
    )
    loader = get_loader(dataset)
    return [batch for _ in range(train) for batch in loader]


def lite(root: Path, case: dict[str, Any], train: int = 0, **arguments: Any) -> list[Any]:
    from energon_lite import SkipSample, TaskEncoder, WorkerConfig, get_loader, get_train_dataset, get_val_dataset

    cls = type("Encoder", (TaskEncoder,), hooks(case, SkipSample))
    common: dict[str, Any] = {
        "worker_config": WorkerConfig(rank=0, world_size=1, num_workers=0),
        "batch_size": case["batch_size"],
        "packing_buffer_size": case.get("packing"),
        "task_encoder": cls(),
        **arguments,
    }
    if not train:
        return list(get_loader(get_val_dataset(root, **common)))
    loader = get_loader(get_train_dataset(root, repeat=False, **common))
    return [batch for _ in range(train) for batch in loader]


def _names(batches: list[Any]) -> list[Any]:
    return [{name: value for name, value in batch.items() if name != "__restore_key__"} for batch in batches]


@pytest.fixture
def texts(tmp_path: Path, tools: Any) -> Path:
    shards: Path = tools.write_shards(tmp_path / "data", 8)
    tools.lite_prepare(
        shards, "--split-ratio", "1,0,0", "--sample-type", "TextSample", "--field-map", '{"text": "txt"}'
    )
    names = ["train/part-000.tar", "train/part-001.tar", "train/part-002.tar", "held/out.tar", "x.0.tar"]
    tools.write_meta(shards, "split.yaml", {"split_parts": {"train": names, "val": names[:]}, "exclude": []})
    return shards


@pytest.mark.nightly
def test_the_same_batches_where_a_chunk_is_the_whole_pass(texts: Path) -> None:
    for name, case in CASES.items():
        ours, theirs = _names(lite(texts, case, chunk_size=1000)), _names(energon(texts, case))
        assert ours == theirs, name
        assert len(ours) > 2, name


def test_the_same_samples_with_small_chunks(texts: Path) -> None:
    """Chunk ends may move samples into other (smaller) batches, but neither lose nor double any."""
    for name in ("generator", "groups", "groups with sizes", "groups of generators"):
        case = CASES[name]
        ours = Counter(sample for batch in lite(texts, case, chunk_size=4) for sample in batch["names"])
        assert ours == Counter(sample for batch in energon(texts, case) for sample in batch["names"]), name


def test_the_same_samples_each_epoch_of_training(texts: Path) -> None:
    for name in ("generator", "groups", "groups of generators"):
        counts = [
            Counter(sample for batch in batches for sample in batch["names"])
            for batches in (lite(texts, CASES[name], train=2), energon(texts, CASES[name], train=2))
        ]
        assert counts[0] == counts[1] and set(counts[0].values()) == {2}, name
