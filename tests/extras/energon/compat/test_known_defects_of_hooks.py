"""Faults that Megatron-Energon is known to have, in hooks, restored samples and commands; none may come up here.

Each test is about one fault, which its first line describes, and does what brings it to light.
"""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import (
    Cooker,
    SkipSample,
    TaskEncoder,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from energon_lite.errors import FatalSampleError, UsageError
from energon_lite.storage.files.shard_store import ShardStore
from energon_lite.storage.index.index_cache import index_places
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.testing import ALONE, invoke

CRUDE_YAML = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


def _loader(path: Any, encoder: TaskEncoder, workers: int = 0, **more: Any) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    arguments = {"batch_size": 2} | more
    return get_savable_loader(get_train_dataset(path, worker_config=config, task_encoder=encoder, **arguments))


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )


def _run(*words: str) -> Any:
    return invoke(*words)


class Draws(TaskEncoder):
    @stateless(restore_seeds=True)
    def encode_sample(self, sample: Any) -> Any:
        return {
            "__key__": sample.__key__,
            "__restore_key__": sample.__restore_key__,
            "drawn": torch.tensor([random.random(), torch.rand(()).item()], dtype=torch.float64),
        }


def test_seeds_of_a_hook_do_not_stick(leaf_of: Any) -> None:
    """2. The seed that a hook had met first was kept for good: in other workers, and where samples were made again."""
    encoder = Draws()
    plain = get_val_dataset(leaf_of(20), batch_size=None, worker_config=ALONE)
    encoder.encode_sample(next(iter(get_savable_loader(plain))))  # used by the trainer itself, before workers exist
    with _loader(leaf_of(20), encoder, workers=3) as loader:
        batches = [batch for _, batch in zip(range(10), loader, strict=False)]
        assert len(torch.unique(torch.cat([batch["drawn"] for batch in batches]))) == 40, "no two draws are equal"
        for batch in batches:  # of all three workers
            assert _equal(loader.restore_sample(batch["__restore_key__"]), batch)
    with _loader(leaf_of(20), Draws()) as alone:
        assert all(map(_equal, alone, batches))


class Tolerates(TaskEncoder):
    @stateless(restore_seeds=True, failure_tolerance=3)
    def encode_sample(self, sample: Any) -> Any:
        raise ValueError("always")


def test_a_tolerance_given_with_restored_seeds_counts(leaf_of: Any) -> None:
    """2. A tolerance given together with restored seeds was dropped without a word."""
    with _loader(leaf_of(20), Tolerates()) as loader:
        with pytest.raises(FatalSampleError, match="encode_sample failed 3 times in a row"):
            next(iter(loader))


class Packs(TaskEncoder):
    def preencode_sample(self, sample: Any) -> Any:
        return {"__key__": sample.__key__, "__restore_key__": sample.__restore_key__, "x": self.rng.random()}

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[at : at + 3] for at in range(0, len(samples), 3)]

    def postencode_sample(self, sample: Any) -> Any:
        return sample | {"x": sample["x"] + self.rng.random()}

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        keys = "+".join(sample["__key__"] for sample in samples)
        return {"__key__": keys, "__restore_key__": (), "x": [sample["x"] for sample in samples]}


@pytest.mark.parametrize("batch_size", [None, 2])
def test_packs_with_late_encoding_are_made_again(batch_size: int | None, leaf_of: Any) -> None:
    """3. A packed batch could not be made again from its key when samples are encoded after the selection."""
    with _loader(leaf_of(50), Packs(), workers=2, batch_size=batch_size, packing_buffer_size=9) as loader:
        batches = [batch for _, batch in zip(range(8), loader, strict=False)]
    other = _loader(leaf_of(50), Packs(), batch_size=batch_size, packing_buffer_size=9)
    for batch in batches:
        assert _equal(other.restore_sample(json.loads(json.dumps(batch["__restore_key__"]))), batch)


class Groups(TaskEncoder):
    """Samples of even and of odd numbers do not meet; some cannot be told to be either."""

    bad: type[Exception] | None = None

    def encode_sample(self, sample: Any) -> Any:
        return {"__key__": sample.__key__, "__restore_key__": sample.__restore_key__, "x": self.rng.random()}

    def batch_group_criterion(self, sample: Any) -> Any:
        number = int(sample["__key__"].split("-")[1])
        if self.bad is not None and number % 5 == 2:
            raise self.bad("of no group")
        return number % 2, 2


def test_grouped_batches_are_made_again(leaf_of: Any) -> None:
    """4. A batch of a group could never be made again from its key."""
    with _loader(leaf_of(50), Groups(), workers=2, batch_size=None) as loader:
        batches = [batch for _, batch in zip(range(8), loader, strict=False)]
    other = _loader(leaf_of(50), Groups(), batch_size=None)
    for batch in batches:
        assert _equal(other.restore_sample(batch["__restore_key__"]), batch)


@pytest.mark.parametrize("error", [SkipSample, ValueError])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_without_a_group_is_left_out(error: type[Exception], workers: int, leaf_of: Any) -> None:
    """5. A sample whose group could not be told got into the group of the sample before it."""
    encoder = Groups()
    encoder.bad = error
    with _loader(leaf_of(50), encoder, workers=workers, batch_size=None, repeat=False) as loader:
        groups = [[int(key.split("-")[1]) for key in batch["__key__"]] for batch in loader]
        stats = loader.stats()
    assert all(len({number % 2 for number in group}) == 1 for group in groups)
    assert sorted(number for group in groups for number in group) == [n for n in range(50) if n % 5 != 2]
    assert stats["skipped" if error is SkipSample else "failed"] == 10
    assert stats["samples"] == 40


def _tar(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


PREPARE = (
    "--non-interactive",
    "--split-ratio",
    "1,0,0",
    "--sample-type",
    "TextSample",
    "--field-map",
    '{"text": "txt"}',
)

FAILURES: dict[str, tuple[str, ...]] = {
    "an option that does not exist": (*PREPARE, "--media-metadata-by-size", "5"),
    "two ways to find media": (*PREPARE, "--media-metadata-by-glob", "*.txt", "--media-metadata-by-header"),
    "a part that no sample has": (*PREPARE[:-1], '{"text": "png"}'),
    "a type that does not exist": (*PREPARE[:2], "--sample-type=TextSampel", *PREPARE[3:]),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_preparation_that_fails_does_not_stand_in_the_way(case: str, tmp_path: Path) -> None:
    """8. A failed preparation left a folder that was taken for something else, and could not be prepared any more."""
    data = tmp_path / "data"
    _tar(data / "s.tar", {f"{number}.txt": b"text" for number in range(5)})
    failed = _run("prepare", str(data), *FAILURES[case])
    assert failed.exit_code != 0 and "Traceback" not in failed.output
    done = _run("prepare", str(data), *PREPARE)
    assert done.exit_code == 0, done.output
    with _loader(data, TaskEncoder(), batch_size=1) as loader:
        assert next(iter(loader)).text == ["text"]


@pytest.fixture
def crude(tmp_path: Path, write_dataset: Callable[..., Path]) -> Path:
    samples = [
        (f"{number}", {"txt": f"text {number}".encode(), "json": b"{}" if number % 4 else b"{"}) for number in range(12)
    ]
    return write_dataset(tmp_path / "crude", {"s.tar": samples}, dataset_yaml=CRUDE_YAML)


class Cooks(TaskEncoder):
    @stateless
    def cook(sample: Any) -> Any:
        return {**basic_sample_keys(sample), "text": sample["txt"], "about": sample["json"]}

    cookers = (Cooker(cook),)

    def encode_sample(self, sample: Any) -> Any:
        noise = [float(self.rng.random())]
        return {name: sample[name] for name in ("__key__", "__restore_key__", "text")} | {"noise": noise}


def test_commands_on_crude_data_with_bad_samples(crude: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """9. Commands broke on crude data, and the one that looks for bad samples found none."""
    info = _run("info", str(crude))
    assert info.exit_code == 0, info.output
    assert "12" in info.output
    (tmp_path / "my_cooks.py").write_text(
        "from energon_lite import *\n"
        "def cook(sample):\n"
        "    return {**basic_sample_keys(sample), 'x': sample['txt'], 'y': sample['json']}\n"
        "class Cooks(TaskEncoder):\n"
        "    cookers = [Cooker(cook)]\n"
        "    def encode_sample(self, sample):\n"
        "        return sample\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    measured = _run("measure", str(crude), "--task-encoder", "my_cooks:Cooks", "--length-field", "x")
    assert measured.exit_code == 0, measured.output
    assert "3 failed" in measured.output
    assert measured.output.count("failed in") == 1 and "3 x failed in" in measured.output


def test_reading_twice_gives_the_same_thing(crude: Path) -> None:
    """11. What was taken out of a cache a second time came back in another form."""
    source = WebdatasetSource.open(crude, store=ShardStore(capacity=1))
    first, second = SampleReader(source).sample(3), SampleReader(source).sample(3)
    assert type(first) is type(second) and first == second
    assert list(first.parts) == ["txt", "json"]
    loader = _loader(crude, Cooks())
    batch = next(iter(loader))
    again = [loader.restore_sample(batch["__restore_key__"]) for _ in range(2)]
    assert all(_equal(one, batch) for one in again)


def test_splits_that_list_the_same_shards_in_another_order(tmp_path: Path, write_dataset: Callable[..., Path]) -> None:
    """14. Two splits of a folder shared an index that was right for the one opened first only."""
    shards = {f"s{at}.tar": [(f"{at}-{i}", {"txt": f"{at}-{i}".encode()}) for i in range(1 + at)] for at in range(4)}
    splits = {"train": ["s3.tar", "s1.tar"], "val": ["s1.tar", "s3.tar", "s0.tar"], "test": list(shards)}
    path = write_dataset(tmp_path / "data", shards, splits=splits)
    for order in (["train", "val", "test"], ["test", "val", "train"]):
        for split in order:  # each finds the index that another one has left
            dataset = get_val_dataset(path, split_part=split, batch_size=None, worker_config=ALONE)
            found = [(sample.__key__, sample.text) for sample in get_savable_loader(dataset)]
            expected = [key for shard in splits[split] for key, _ in shards[shard]]
            assert found == [(key, key) for key in expected]


def test_data_sets_of_one_name_have_indexes_of_their_own(tmp_path: Path) -> None:
    """14. Likewise for two folders of the same name, where the index stands in the user's cache."""
    places = [index_places(str(tmp_path / parent / "data"))[1] for parent in "ab"]
    assert len(set(places)) == 2


def test_samples_that_were_cooked_are_made_again(crude: Path) -> None:
    """17. A wrapper of a data set lost, on the way to a single sample, what is needed to make it."""
    bad = {f"{number}" for number in range(0, 12, 4)}
    with _loader(crude, Cooks(), workers=2, batch_size=None) as loader:
        samples = [sample for _, sample in zip(range(20), loader, strict=False)]
    other = _loader(crude, Cooks(), batch_size=None)
    for sample in samples:
        assert sample["__key__"] not in bad
        assert _equal(other.restore_sample(json.loads(json.dumps(sample["__restore_key__"]))), sample)


@pytest.mark.parametrize("key", ["3", "3.json", ("Webdataset", "3"), 3])
def test_keys_that_are_none(key: Any, crude: Path) -> None:
    """17. A key of another form ran into a variable that had no value."""
    with pytest.raises(UsageError, match="not a restore key"):
        _loader(crude, Cooks()).restore_sample(key)
