"""The file of bad samples: one line each, once, whoever saw it, and never the end of a run."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from energon_lite import SkipSample, TaskEncoder
from energon_lite.extras.inspect.quarantine import Quarantine
from energon_lite.loading.batch_observer import ObservedRank
from energon_lite.loading.executors.executor import WorkSeconds
from energon_lite.loading.makers.outcomes import Failure
from tests.testing import json_lines, take, train_loader, val_loader


def _quarantine(file: Any, rank: int = 0) -> Quarantine:
    runner: Any = None  # the file needs none
    return Quarantine(file, ObservedRank(rank, 1, (), runner, WorkSeconds()))


def _failures(*keys: str, reason: str = "") -> list[Failure]:
    return [Failure("leaf", key, "read", reason, False) for key in keys]


class Picky(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        number = int(sample.text[2:])
        if number % 10 == 3:
            raise SkipSample("ends with 3")
        if number % 10 == 7:
            raise ValueError("ends with\n7")
        return sample


BAD = {f"a-{number}" for number in range(30) if number % 10 in (3, 7)}


def _loader(path: Any, file: Path, get: Any = train_loader, **more: Any) -> Any:
    return get(path, quarantine=file, **{"batch_size": 4, "task_encoder": Picky(), **more})


@pytest.mark.parametrize("workers", [0, 1])
def test_a_line_for_each_bad_sample(leaf_of: Any, tmp_path: Path, workers: int) -> None:
    file = tmp_path / "new" / "bad.jsonl"
    with _loader(leaf_of(30), file, num_workers=workers) as loader:
        assert json_lines(file) == []
        take(loader, 40)  # several epochs
        assert loader.stats()["quarantine"] == {"path": str(file), "written": 6, "lost": 0}
        lines = {line["key"]: line for line in json_lines(file)}
        assert len(lines) == len(json_lines(file)) == 6 and lines.keys() == BAD
        assert lines["a-3"] == {
            "key": "a-3",
            "leaf": "a-30[train]",
            "path": str(leaf_of(30)),
            "shard": "shard-000.tar",
            "index": 3,
            "stage": "encode_sample",
            "error": "ends with 3",
            "skipped": True,
            "rank": 0,
            "restore_key": lines["a-3"]["restore_key"],
        }
        assert lines["a-27"]["error"] == "ValueError: ends with\n7" and lines["a-27"]["shard"] == "shard-002.tar"
        with pytest.raises(ValueError, match="ends with 3"):
            loader.restore_sample(lines["a-3"]["restore_key"])


def test_what_is_not_delivered_is_not_written(leaf_of: Any, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    with _loader(leaf_of(30), file, num_workers=1, get=val_loader, batch_size=2) as loader:
        iterator = iter(loader)
        for expected in ([], ["a-3"], ["a-3"], ["a-3", "a-7"]):
            next(iterator)
            assert [line["key"] for line in json_lines(file)] == expected


def test_ranks_share_a_file(leaf_of: Any, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    take(zip(*(_loader(leaf_of(30), file, rank=rank, world_size=2) for rank in range(2)), strict=False), 20)
    keys = [line["key"] for line in json_lines(file)]
    assert sorted(keys) == sorted(BAD) and {line["rank"] for line in json_lines(file)} == {0, 1}


def _write_many(path: str, tag: int) -> None:
    quarantine = _quarantine(path, tag)
    for number in range(50):
        quarantine.on_lost(_failures(f"{tag % 2}-{number}", reason="x" * 200))


def test_processes_at_the_same_time(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write_many, args=(str(file), tag)) for tag in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(line["key"] for line in json_lines(file)) == sorted(
        f"{tag}-{n}" for tag in range(2) for n in range(50)
    )


def test_a_line_that_was_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    for cut in (10, 0):
        _quarantine(file).on_lost(_failures("one", "two"))
        file.write_bytes(file.read_bytes()[: -cut or None])
    lines = file.read_text().splitlines()
    assert [json.loads(line)["key"] for line in (lines[0], lines[2])] == ["one", "two"] and len(lines) == 3


@pytest.mark.parametrize("bad", ["a folder", "/dev/full", "/proc/nowhere/bad.jsonl"])
def test_a_file_that_cannot_be_written_is_warned_of_once(
    leaf_of: Any, tmp_path: Path, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    (tmp_path / "a folder").mkdir()
    path = Path(bad) if bad.startswith("/") else tmp_path / bad
    with _loader(leaf_of(30), path) as loader:
        assert len(take(loader, 20)) == 20
        stats = loader.stats()
    assert stats["quarantine"]["written"] == 0 and stats["quarantine"]["lost"] >= 6
    warnings = [record.getMessage() for record in caplog.records if record.name.endswith(".quarantine")]
    assert len(warnings) == 1 and str(path) in warnings[0] and "The run goes on" in warnings[0]


def test_it_goes_on_when_the_disk_has_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bad.jsonl"
    quarantine = _quarantine(file)
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 60:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:50])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        quarantine.on_lost(_failures("one"))
    quarantine.on_lost(_failures("two"))
    quarantine.on_lost(_failures("one"))
    lines = file.read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines[1:]] == ["two", "one"] and len(lines[0]) >= 50
    assert quarantine.stats() == {"path": str(file), "written": 2, "lost": 1}


def test_packed_samples_have_their_lines_too(leaf_of: Any, tmp_path: Path) -> None:
    class Packs(Picky):
        def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
            return [samples[:2], samples[2:-1]]  # the last one is left out, which is nobody's fault

        def pack_selected_samples(self, samples: list[Any]) -> Any:
            if any(sample.text == "a-5" for sample in samples):
                raise ValueError("five")
            return {"text": [sample.text for sample in samples]}

    file = tmp_path / "bad.jsonl"
    with _loader(leaf_of(30), file, task_encoder=Packs(), batch_size=1, packing_buffer_size=6, repeat=False) as loader:
        assert list(loader)
    lines = json_lines(file)
    assert {line["key"] for line in lines if line["stage"] == "encode_sample"} == BAD
    packed = [line for line in lines if line["stage"] == "pack_selected_samples"]
    assert "a-5" in {line["key"] for line in packed} and 1 < len(packed) <= 3
    assert all(line["path"] == str(leaf_of(30)) for line in lines)
    assert {line["stage"] for line in lines} == {"encode_sample", "pack_selected_samples"}


def test_only_one_of_several_peers_writes(leaf_of: Any, tmp_path: Path) -> None:
    loader = _loader(leaf_of(30), tmp_path / "bad.jsonl", saves_state=False)
    take(loader, 20)
    assert not (tmp_path / "bad.jsonl").exists() and "quarantine" not in loader.stats()
