"""Errors on the fast route are counted and logged once; the batch is made by the reporting route."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from energon_lite import TaskEncoder, get_savable_loader, get_train_dataset
from energon_lite.storage.read.sample_reader import SampleReader
from tests.testing import alone

SAMPLES = 24


class Batches(TaskEncoder):
    def batch(self, samples: list[Any]) -> Any:
        return samples


def _broken(*_: Any) -> Any:
    raise ValueError("broken fast route")


def _loader(path: Any, encoder: TaskEncoder | None, way: str = "main") -> Any:
    config = alone(0 if way == "main" else 2)
    dataset = get_train_dataset(path, batch_size=8, task_encoder=encoder, worker_config=config)
    return get_savable_loader(dataset, **({"start_method": way} if way != "main" else {}))


def _break_decoding(loader: Any) -> Any:
    fields = loader.dataset.leaves[0].fields
    ((part, (_, named)),) = fields.steps.items()
    fields.steps[part] = _broken, named
    return fields


@pytest.mark.parametrize("way", ["main", "fork", "thread"])
def test_each_reason_is_counted_and_logged_once(
    leaf_of: Any, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(SampleReader, "read", _broken)
    with _loader(leaf_of(SAMPLES), Batches(), way) as loader:
        for _, batch in zip(range(3), loader, strict=False):
            assert [sample.text for sample in batch] == [sample.__key__ for sample in batch]
        stats = loader.stats()
    assert stats["failed"] == 0 and stats["fallbacks"].keys() == {"read_together: ValueError"}
    assert stats["fallbacks"]["read_together: ValueError"] >= 3  # at least one for each delivered batch
    (record,) = [record for record in caplog.records if "fast route" in record.message]
    assert "broken fast route" in record.message and loader.dataset.leaves[0].name in record.message


def test_an_error_in_fields_of_a_batch(leaf_of: Any) -> None:
    with _loader(leaf_of(SAMPLES), None) as loader:
        _break_decoding(loader)
        assert len(next(iter(loader)).__key__) == 8
        assert loader.stats()["fallbacks"] == {"collate: ValueError": 1, "decode: ValueError": 8}


def test_an_error_in_samples_made_together(leaf_of: Any) -> None:
    with _loader(leaf_of(SAMPLES), Batches()) as loader:
        _break_decoding(loader).decodes = False
        assert len(next(iter(loader))) == 8
        assert loader.stats()["fallbacks"] == {"decode_together: ValueError": 1, "decode: ValueError": 8}


def test_there_are_none_on_the_fast_route(leaf_of: Any) -> None:
    with _loader(leaf_of(SAMPLES), Batches(), "fork") as loader:
        next(iter(loader))
        assert loader.stats()["fallbacks"] == {} and loader.gather_stats()["fallbacks"] == {}
