from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from energon_lite.storage import dataset_scan
from energon_lite.storage.dataset_scan import odd_sample_notes, usual_parts
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar_scan import scan_shard
from tests.testing import Parts, write_tar


def notes(path: Path, odd: dict[int, Parts], count: int = 100) -> list[str]:
    """What is said of two shards of samples with a text and a label, but for some."""
    samples = [(f"{number:03d}", odd.get(number, {"txt": b"x", "cls": b"1"})) for number in range(count)]
    for name, some in (("a.tar", samples[: count // 2]), ("b.tar", samples[count // 2 :])):
        write_tar(path / name, some)
    return [*odd_sample_notes(PackedIndex.from_scans([scan_shard(str(path), name) for name in ("a.tar", "b.tar")]))]


@pytest.mark.parametrize("block", [1 << 20, 7])
def test_each_kind(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_scan, "_BLOCK", block)
    odd: dict[int, Parts] = {3: {"txt": b"", "cls": b"1"}, 60: {"txt": b"x"}, 99: {"txt": b"", "cls": b""}}
    assert sorted(notes(tmp_path, odd)) == [
        "1 sample has no part 'cls', which nearly all others have: b.tar: 060.cls",
        "3 samples have a part without bytes: a.tar: 003.txt, b.tar: 099.txt, b.tar: 099.cls",
    ]


def test_a_part_in_the_place_of_another(tmp_path: Path) -> None:
    assert notes(tmp_path, {5: {"txt": b"x", "json": b"1"}}) == []


def test_a_part_that_many_have_not_is_no_loss(tmp_path: Path) -> None:
    assert notes(tmp_path, {number: {"txt": b"x"} for number in range(5)}) == []


def test_a_part_twice(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("0", {"txt": b"1", "cls": b"1"}), ("0", {"txt": b"2"})])
    index = PackedIndex.from_scans([scan_shard(str(tmp_path), "a.tar")])
    assert [*odd_sample_notes(index)] == ["1 sample has a part more than once: a.tar: 0.txt"]


def test_usual_parts() -> None:
    numbers = np.array([0] * 100 + [1] * 98 + [2] * 97)
    assert usual_parts(numbers, ["a", "b", "c"], 100) == {"a", "b"}
    assert [*odd_sample_notes(PackedIndex.from_scans([]))] == []
