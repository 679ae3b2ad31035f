"""What is measured of reading large data sets, for ``private_growth``: this file imports nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from energon_lite.storage.files import stored_array
from energon_lite.storage.files.byte_ranges import map_file
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.sample_choice import SampleChoice
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource

Work = Callable[[], bool]


#: Samples of an index of 10**8, by the column that tells which to skip.
LENGTHS = {None: 100_000_000, "skip": 66_660_000}


def read_everything(folder: str, excluded: list[list[str]], length: int) -> Work:
    source = WebdatasetSource.open(folder, excluded_samples=[(shard, key) for shard, key in excluded])
    assert len(source) == length

    def read() -> bool:
        reader = SampleReader(source)
        return all(len(reader.sample(number).parts) == 1 for number in range(length))

    return read


def open_huge(path: str, folder: str, skips: str | None) -> WebdatasetSource:
    opened = PackedIndex.open(path)
    nothing = np.zeros(0, dtype=np.int64)
    return WebdatasetSource(SampleChoice(opened, folder, opened.shard_names, nothing, skips=skips))


def use_huge(path: str, folder: str, numbers: list[int], copied: bool) -> Work:
    """Keys and flags of these samples; ``copied``: a whole column is kept in memory, too."""
    kept: list[Any] = []

    def use() -> bool:
        for skips, length in LENGTHS.items():
            source = open_huge(path, folder, skips)
            flags = source.column("skip")
            if len(source) != length or any(source.key(number) for number in numbers):
                return False
            if skips and flags[np.array(numbers)].any():
                return False
            if copied and skips:
                kept.append(np.ones(length, dtype=np.uint8) + flags[0])
        return True

    return use


def look_up(path: str, samples: int, mapped: bool) -> Work:
    """3,000 keys of an index; ``mapped``: and its whole file, which is mapped."""
    # Blocks of an index that one process may keep, and so 4 MiB: this one stands for one above 64 MiB.
    stored_array._KEPT, stored_array._OWN = 512, 1
    index, choose = PackedIndex.open(path), random.Random(0)
    kept: list[Any] = []

    def right(sample: int) -> bool:
        return index.key(sample) == f"{sample:08d}" and bool(index.key_and_part_rows(sample)[1][1] == sample % 512)

    def look() -> bool:
        if mapped:
            with open(path, "rb") as file:
                kept.append(view := map_file(file.fileno()))
            sum(view[::4096])
        return all(right(choose.randrange(samples)) for _ in range(3000))

    assert right(0)  # all code and its objects have been used
    stored_array._kept.clear()  # blocks that a worker would let go, and so copy
    return look
