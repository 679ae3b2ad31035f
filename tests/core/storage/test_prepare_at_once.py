"""Several preparations of one folder at the same time."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite.errors import DatasetError
from energon_lite.storage.prepare import index_again, prepare_dataset
from energon_lite.storage.read.webdataset import WebdatasetSource

SHARDS = 30


@pytest.fixture
def folder(tmp_path: Path, write_dataset: Callable[..., Path]) -> Path:
    made = write_dataset(
        tmp_path / "data", {f"{n}.tar": [(f"{n}-{k}", {"txt": b"x"}) for k in range(9)] for n in range(SHARDS)}
    )
    for file in (made / ".nv-meta").iterdir():
        file.unlink()
    return made


def prepared(folder: Path, **options: Any) -> Any:
    return prepare_dataset(
        folder, split_ratio="1,0,0", sample_type="TextSample", field_map={"text": "txt"}, workers=1, **options
    )


def slowly(*_: object) -> None:
    """So that they meet, also on a quick disk."""
    time.sleep(random.random() / 100)


@pytest.mark.parametrize("trial", range(3))
def test_three_at_once(folder: Path, trial: int) -> None:
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(3), context.SimpleQueue()

    def body() -> None:
        start.wait(120)
        try:
            answers.put(str(prepared(folder, force_overwrite=True, progress=slowly).samples))
        except BaseException as error:
            answers.put(f"{type(error).__name__}: {error}")

    processes = [context.Process(target=body) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    said = sorted(answers.get() for _ in processes)
    assert said[0] == str(9 * SHARDS)
    assert all(one == said[0] or one.startswith("DatasetError: another process prepares") for one in said), said
    assert len(WebdatasetSource.open(str(folder), split_part="train")) == 9 * SHARDS
    left = {file.name for file in folder.rglob("*") if file.suffix not in (".tar", ".idx")}
    assert left == {".nv-meta", ".info.json", "dataset.yaml", "index.sqlite", "index.uuid", "split.yaml"}


def test_one_that_comes_while_another_decides(folder: Path) -> None:
    """And after it, or after it has failed, the next one may."""
    refused: list[DatasetError] = []

    def progress(done: int, count: int, words: str) -> None:
        if done != 1:
            return
        for other in (prepared, index_again):
            with pytest.raises(DatasetError, match="another process prepares this folder") as found:
                other(str(folder))
            refused.append(found.value)
        raise KeyboardInterrupt

    prepared(folder)
    with pytest.raises(KeyboardInterrupt):
        prepared(folder, force_overwrite=True, rescan=True, progress=progress)
    assert len(refused) == 2 and refused[0].where == str(folder)
    assert prepared(folder, force_overwrite=True).samples == index_again(str(folder)).samples == 9 * SHARDS
