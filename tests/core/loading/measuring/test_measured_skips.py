"""Samples that a measuring found to be skipped are left out of the order, if the user says so."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite import SkipSample, TaskEncoder, get_savable_loader, get_val_datasets
from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.errors import DataIndexError, EmptyDatasetError, StateMismatchError
from energon_lite.loading.leaves import open_whole
from energon_lite.loading.makers.sample_length import SampleLength
from energon_lite.loading.measured_columns import Maker
from energon_lite.loading.measuring import measure
from energon_lite.loading.measuring_runner import MeasuringRunner
from energon_lite.storage.index.columns import write_column
from tests.testing import ALONE, metadataset, train_loader, val_loader, write_dataset


class Odd(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        number = int(sample.text.rpartition("-")[2])
        if number % 2 == 0:
            raise SkipSample("even")
        if number == 5:
            raise ValueError("five")
        return {"tokens": [number]}


class Other(Odd):
    pass


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Twelve samples with the texts 0 .. 11 in three shards, the last one for validation; 7 is excluded."""
    shards = {f"{s}.tar": [(f"{s}{n}", {"txt": str(4 * s + n).encode()}) for n in range(4)] for s in range(3)}
    splits = {"train": ["1.tar", "0.tar"], "val": ["2.tar"]}
    return write_dataset(tmp_path / "d", shards, splits=splits, exclude=["1.tar/13"])


def measured(data: Path, encoder: TaskEncoder, **options: Any) -> None:
    leaf = open_whole(LeafSpec(str(data), ""), encoder, False)
    maker = Maker({"by": "measure", "encoder_class": type(encoder).__name__})
    measure(MeasuringRunner(leaf, encoder, SampleLength(encoder)), maker, workers=0, **options)


def loader_of(data: Path | dict[str, Any], **options: Any) -> Any:
    return train_loader(data, **{"batch_size": 1, "task_encoder": Odd(), **options})


def train(data: Path | dict[str, Any], **options: Any) -> Any:
    """The data set, without what the measuring found to be skipped."""
    return loader_of(data, **{"use_measured_skips": True, **options}).dataset


def numbers(loader: Any) -> list[int]:
    return [int(number) for batch in loader for number in np.asarray(batch["tokens"]).ravel()]


def test_an_epoch_is_exactly_the_others(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    measured(data, Odd())
    caplog.set_level(logging.INFO)
    # With another seed, the refill may be one that fails, too, and is refilled again.
    loader = loader_of(data, use_measured_skips=True, repeat=False, seed_offset=2)
    source = loader.dataset.leaves[0].source
    assert len(source) == 3 and "4 samples are left out" in caplog.text  # 1, 3 and 5, which fails
    found = numbers(loader)
    # The sample that fails keeps its place: it is counted, and refilled by one of the others.
    assert len(found) == 3 and {1, 3} <= set(found)
    assert (loader.stats()["skipped"], loader.stats()["failed"]) == (0, 1)


def test_without_the_word_nothing_changes(data: Path) -> None:
    before = loader_of(data).dataset
    measured(data, Odd())
    after = loader_of(data).dataset
    assert before.identity == after.identity and len(after.leaves[0].source) == 7


def test_validation_leaves_no_hole(data: Path) -> None:
    measured(data, Odd())
    options: dict[str, Any] = {"batch_size": 2, "task_encoder": Odd(), "use_measured_skips": True}
    ((of_leaf, _),) = get_val_datasets(data, worker_config=ALONE, **options)
    for loader in (val_loader(data, **options), get_savable_loader(of_leaf)):
        assert len(loader.dataset) == 1 and numbers(loader) == [9, 11]


def test_it_is_another_data_set_if_anything_is_left_out(data: Path) -> None:
    measured(data, Odd())
    plain, without = loader_of(data), loader_of(data, use_measured_skips=True)
    one, other = plain.dataset, without.dataset
    assert one.identity.fingerprint != other.identity.fingerprint and one.leaves[0].key != other.leaves[0].key
    with pytest.raises(StateMismatchError, match="samples in all data sets: 7 in the state, 3 here"):
        without.restore_state_rank(plain.save_state_rank())
    write_column(data, "skip", np.zeros(12, dtype=np.uint8))
    assert train(data).identity.fingerprint == one.identity.fingerprint


def test_a_subset_counts_the_skipped_ones(data: Path) -> None:
    measured(data, Odd())
    # Of 4 5 6 (7) 0 1 2 3 the subset takes 6 (7) 0 1 2, whether or not some of these are skipped.
    source = train(metadataset({"path": str(data), "subset": {"range": [2, 7]}})).leaves[0].source
    assert [source.key(number) for number in range(len(source))] == ["01"]


def test_a_copy_in_another_process(data: Path) -> None:
    measured(data, Odd())
    source = train(data).leaves[0].source
    copy = pickle.loads(pickle.dumps(source))
    assert [copy.key(n) for n in range(3)] == [source.key(n) for n in range(3)]
    versions = 12 * len(source.shard_names)  # bytes, at most
    assert copy.fingerprint == source.fingerprint and len(pickle.dumps(source)) < 700 + versions
    pickled = pickle.dumps(source)
    write_column(data, "skip", np.eye(12, dtype=np.uint8)[1])
    with pytest.raises(DataIndexError, match="measured again while it was in use"):
        pickle.loads(pickled).key(0)


def test_another_column(data: Path) -> None:
    measured(data, Odd(), name="odd")
    assert len(train(data, use_measured_skips="odd.skip").leaves[0].source) == 3
    with pytest.raises(
        DataIndexError, match=r"no column 'skip'; it has odd.length, odd.skip[\s\S]*energon-lite measure"
    ):
        train(data)


def test_another_encoder_is_told(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    measured(data, Odd())
    train(data)
    assert "which may skip others" not in caplog.text
    train(data, task_encoder=Other())
    assert "leaves out what Odd skipped, but the task encoder is Other" in caplog.text


def test_all_are_skipped(data: Path) -> None:
    write_column(data, "skip", np.ones(12, dtype=np.uint8))
    with pytest.raises(EmptyDatasetError, match=r"all 7 samples in split 'train' were skipped when they were measured"):
        train(data)
