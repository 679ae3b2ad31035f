from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from energon_lite.config.leaf_spec import Subset
from energon_lite.errors import (
    DataIndexError,
    DatasetError,
    EmptyDatasetError,
    MissingShardError,
    NotPreparedError,
    ShardChangedError,
)
from energon_lite.storage.files.shard_store import ShardStore
from energon_lite.storage.index.columns import write_column
from energon_lite.storage.prepare import prepare_dataset
from energon_lite.storage.read.opened_source import data_digest
from energon_lite.storage.read.sample_choice import DenseExclusion, SparseExclusion
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.testing import calls_here, write_dataset, write_members, write_tar


def keys(source: WebdatasetSource) -> str:
    return "".join(SampleReader(source).sample(i).key for i in range(len(source)))


def test_samples_by_number(data: Path) -> None:
    source = WebdatasetSource.open(data)
    assert keys(source) == "0123456789" == "".join(source.key(i) for i in range(10))
    raw = SampleReader(source).sample(4)
    assert raw.parts == {"txt": b"text 4", "cls": b"4"}
    assert raw.source.shard_name == "b.tar" and raw.source.file_names == ("4.txt", "4.cls")
    assert raw.source.index == 4 and raw.source.dataset_path == str(data)
    for wrong in (-1, 10):
        with pytest.raises(IndexError, match=f"{wrong} of 10"):
            SampleReader(source).sample(wrong)


def test_only_wanted_parts(data: Path) -> None:
    source = WebdatasetSource.open(data)
    assert SampleReader(source, frozenset({"cls", "jpg"})).sample(4).parts == {"cls": b"4"}
    assert SampleReader(source, frozenset({"cls"})).sample(4).source.file_names == ("4.cls",)
    assert SampleReader(source, frozenset()).sample(4) == ("4", {}, SampleReader(source, frozenset()).sample(4).source)


def test_one_positioned_read_per_sample(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = WebdatasetSource.open(data)
    SampleReader(source).sample(0)
    reads = calls_here(monkeypatch, os, "pread")
    SampleReader(source).sample(1)
    # From the first payload to the end of the second, 1024 bytes later.
    assert [read[1:] for read in reads] == [(1024 + 1, 2048 + 512)]


def test_a_large_unwanted_part_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_members(tmp_path / "d/a.tar", [("0.json", b"{}"), ("0.mp4", b"v" * (3 << 20)), ("0.txt", b"end")])
    prepare_dataset(tmp_path / "d", split_ratio="1,0,0")
    source = WebdatasetSource.open(tmp_path / "d")
    two, every = SampleReader(source, frozenset({"json", "txt"})), SampleReader(source)
    assert every.sample(0).parts["mp4"] == b"v" * (3 << 20)
    reads = calls_here(monkeypatch, os, "pread")
    assert two.sample(0).parts == {"json": b"{}", "txt": b"end"}
    assert two.read([0]).parts == {"json": [b"{}"], "txt": [b"end"]}  # type: ignore[union-attr]
    assert [size for _, size, _ in reads] == [2, 3, 2, 3]


def test_a_part_that_appears_twice_in_a_sample(tmp_path: Path) -> None:
    write_members(tmp_path / "d/a.tar", [("0.txt", b"first"), ("0.txt", b"second")])
    prepare_dataset(tmp_path / "d", split_ratio="1,0,0")
    assert SampleReader(WebdatasetSource.open(tmp_path / "d")).sample(0).parts == {"txt": b"second"}


def test_a_shard_that_is_named_twice_is_read_twice(data: Path) -> None:
    assert keys(WebdatasetSource.open(data, shards=["b.tar", "b.tar"])) == "456456"


@given(
    order=st.permutations(["a.tar", "b.tar", "sub/c.tar"]),
    count=st.integers(1, 3),
    excluded=st.sets(st.integers(0, 9), max_size=9),
    skipped=st.sets(st.integers(0, 9), max_size=9),
    span=st.tuples(st.integers(0, 10), st.integers(0, 10)),
)
@example(order=["a.tar", "b.tar", "sub/c.tar"], count=3, excluded=set(), skipped=set(), span=(2, 9))
def test_any_choice_of_samples(
    ten: Path, order: list[str], count: int, excluded: set[int], skipped: set[int], span: tuple[int, int]
) -> None:
    """A subset counts the samples that are excluded, and those that a column of skips leaves out."""
    if not (ten / ".nv-meta").exists():
        prepare_dataset(ten, split_ratio="1,0,0")
        write_column(ten, "length", np.arange(10, dtype=np.int32) * 11)
    write_column(ten, "skip", np.isin(np.arange(10), list(skipped)).astype(np.uint8))
    members = {"a.tar": [0, 1, 2, 3], "b.tar": [4, 5, 6], "sub/c.tar": [7, 8, 9]}
    left_out = [(shard, str(number)) for shard, held in members.items() for number in held if number in excluded]
    chosen = [number for shard in order[:count] for number in members[shard]]
    start, stop = sorted(min(edge, len(chosen)) for edge in span)
    kept = [number for number in chosen[start:stop] if number not in excluded]
    part = Subset(first=start, last=stop, origin="doc.yaml:7")
    choice: dict[str, Any] = {"shards": order[:count], "excluded_samples": left_out, "subset": part}
    fingerprints = []
    for skips, left in ((None, kept), ("skip", [number for number in kept if number not in skipped])):
        if not left:
            with pytest.raises(EmptyDatasetError) as caught:
                WebdatasetSource.open(ten, **choice, skips=skips)
            assert skips or ("is empty" in str(caught.value) and f"{ten}, subset at doc.yaml:7" in str(caught.value))
            return
        source = WebdatasetSource.open(ten, **choice, skips=skips)
        again = pickle.loads(pickle.dumps(source))
        assert keys(source) == keys(again) == "".join(map(str, left)) and source.fingerprint == again.fingerprint
        assert [int(source.key(number)) for number in range(len(source))] == left
        column = source.column("length")
        assert [value // 11 for value in column] == left
        assert (column[np.arange(len(left))[::-1]] // 11).tolist() == left[::-1]
        assert (column[::-2] // 11).tolist() == left[::-2] and (column[1:-1] // 11).tolist() == left[1:-1]
        assert not skips or source.skipped == len(kept) - len(left)
        for outside in (-1, len(left)):
            with pytest.raises(IndexError):
                SampleReader(source).sample(outside)
        fingerprints.append(source.fingerprint)
    assert (fingerprints[0] == fingerprints[1]) == (left == kept)


def test_exclusions_of_what_is_not_there_are_told(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(WebdatasetSource.open(data, excluded_samples=[("a.tar", "nope"), ("x.tar", "0")])) == 10
    assert "'nope'" in caplog.text and "'x.tar'" in caplog.text


def test_the_fingerprint_depends_on_the_samples_of_the_subset(data: Path) -> None:
    parts = [None, *(Subset(first=first, last=last) for first in (0, 1) for last in (10, 9))]
    prints = [WebdatasetSource.open(data, subset=part).fingerprint for part in parts]
    assert prints[0] == prints[1] and len(set(prints)) == 4


def test_the_fingerprint_depends_on_what_is_read(data: Path) -> None:
    def fingerprint(**options: object) -> str:
        return WebdatasetSource.open(data, **options).fingerprint  # type: ignore[arg-type]

    a, b, c = "a.tar", "b.tar", "sub/c.tar"
    seen = [
        fingerprint(shards=[a, b]),
        fingerprint(shards=[b, a]),
        fingerprint(shards=[a, b, c]),
        fingerprint(shards=[a, b], excluded_samples=[(a, "1")]),
        fingerprint(shards=[a, b], excluded_samples=[(a, "2")]),
    ]
    write_members(data / "b.tar", [("4.txt", b"x" * 20_000), ("5.txt", b""), ("6.txt", b"")])
    prepare_dataset(data, split_ratio="1,0,0", force_overwrite=True)
    seen.append(fingerprint(shards=[a, b]))
    assert len(set(seen)) == len(seen)
    assert seen[0] != "" and fingerprint(shards=[a, b]) == seen[-1]


def test_the_contents_where_names_and_sizes_are_the_same(data: Path) -> None:
    before = WebdatasetSource.open(data)
    assert pickle.loads(pickle.dumps(before)).contents == before.contents != before.fingerprint
    others = [(f"{number}.{part}", text) for number in "xyz" for part, text in (("txt", b"text x"), ("cls", b"x"))]
    write_members(data / "b.tar", others)
    prepare_dataset(data, split_ratio="1,0,0", force_overwrite=True)
    after = WebdatasetSource.open(data)
    assert keys(after) == "0123xyz789"
    assert after.fingerprint == before.fingerprint, "the same order, of other samples"
    assert after.contents != before.contents


def test_a_file_is_no_folder(data: Path) -> None:
    with pytest.raises(NotPreparedError, match="this is a file of no known format"):
        WebdatasetSource.open(data / "a.tar")


def test_an_unknown_kind_of_store() -> None:
    with pytest.raises(DatasetError, match=r"fsspec cannot open gopher://"):
        WebdatasetSource.open("gopher://bucket/data")


def test_a_shard_that_is_gone(data: Path) -> None:
    (data / "b.tar").unlink()
    with pytest.raises(MissingShardError, match=r"b.tar[\s\S]*energon-lite prepare"):
        WebdatasetSource.open(data)
    assert len(WebdatasetSource.open(data, shards=["a.tar"])) == 4  # others are not touched by that


def test_a_shard_replaced_by_one_of_the_same_size_is_noticed_when_read(data: Path) -> None:
    write_members(data / "b.tar", [("other.txt", b"surprise")])
    source = WebdatasetSource.open(data)
    assert SampleReader(source).sample(0).key == "0"
    with pytest.raises(ShardChangedError, match=r"same size, other contents[\s\S]*b.tar"):
        SampleReader(source).sample(5)


def test_an_unknown_shard(data: Path) -> None:
    with pytest.raises(MissingShardError, match=r"split 'val' lists shard 'sub/d.tar'[\s\S]*did you mean 'sub/c.tar'"):
        WebdatasetSource.open(data, shards=["sub/d.tar"], split_part="val")


def test_nothing_to_read(data: Path) -> None:
    with pytest.raises(EmptyDatasetError, match="no shards in split 'test'"):
        WebdatasetSource.open(data, shards=[], split_part="test")
    with pytest.raises(EmptyDatasetError, match="no samples in split 'val'"):
        WebdatasetSource.open(data, shards=["b.tar"], excluded_samples=[("b.tar", k) for k in "456"], split_part="val")


def test_pickles_are_small(data: Path) -> None:
    source = WebdatasetSource.open(data)
    SampleReader(source).sample(3)
    assert len(pickle.dumps(source)) < 768


def test_a_pickle_of_what_was_prepared_anew_meanwhile_is_refused(data: Path) -> None:
    pickled = pickle.dumps(WebdatasetSource.open(data))
    write_members(data / "b.tar", [("4.txt", b"only one")])
    prepare_dataset(data, split_ratio="1,0,0", force_overwrite=True)
    source = pickle.loads(pickled)
    assert len(source) == 10  # the index is not opened yet
    with pytest.raises(DataIndexError, match="prepared again"):
        source.key(0)
    (data / ".nv-meta/energon_lite.idx").unlink()
    with pytest.raises(DataIndexError, match="removed while it was in use"):
        pickle.loads(pickled).key(0)


# -- samples that are left out


def check(kept: SparseExclusion | DenseExclusion, expected: np.ndarray) -> None:
    assert len(kept) == len(expected)
    numbers = np.arange(len(expected), dtype=np.int64)
    assert kept.places(numbers).tolist() == expected.tolist()
    shuffled = np.random.default_rng(1).permutation(numbers)
    assert kept.places(shuffled).tolist() == expected[shuffled].tolist()
    for number in {0, len(expected) // 2, len(expected) - 1} if len(expected) else ():
        assert kept.place(number) == expected[number]


@given(st.integers(0, 2000), st.floats(0, 1), st.integers(0, 99), st.lists(st.integers(0, 2000), max_size=4))
def test_both_forms_answer_as_numpy_does(samples: int, share: float, seed: int, cuts: list[int]) -> None:
    keep = np.random.default_rng(seed).random(samples) < share
    expected = np.flatnonzero(keep)
    check(SparseExclusion(samples, np.flatnonzero(~keep)), expected)
    # However the range is cut into pieces, whose lengths are no multiples of eight.
    pieces = np.split(keep, sorted(cut for cut in cuts if cut <= samples))
    check(DenseExclusion(samples, pieces), expected)
    assert DenseExclusion(samples, pieces).digest == DenseExclusion(samples, [keep]).digest


def test_the_digest_is_that_of_the_choice() -> None:
    rows = [[True, False, True], [True, True, False], [True, True, True]]
    digests = {DenseExclusion(3, [np.array(row)]).digest for row in rows}
    assert len(digests) == 3 and all(len(digest) == 32 for digest in digests)


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_memory_is_a_seventh_of_a_byte_for_a_sample(share: float) -> None:
    keep = np.random.default_rng(0).random(1_000_000) < share
    kept = DenseExclusion(len(keep), [keep])
    assert kept._bits.nbytes + kept._before.nbytes < 0.142 * len(keep)
    expected = np.flatnonzero(keep)
    some = np.random.default_rng(1).integers(0, len(expected), 10_000)
    assert (kept.places(some) == expected[some]).all()


# -- the digest of the data


def digest_of(path: Path, texts: list[bytes], time: int = 0) -> str:
    samples = [(f"{number:03}", {"txt": text}) for number, text in enumerate(texts)]
    shards = {"a.tar": samples[: len(samples) // 2], "b.tar": samples[len(samples) // 2 :]}
    write_dataset(path, shards)
    for name, some in shards.items():
        write_tar(path / name, some, time)
    return data_digest(WebdatasetSource.open(path))


def test_the_data_count_and_neither_place_nor_time(tmp_path: Path) -> None:
    texts = [f"{number:04}".encode() for number in range(60)]
    digest = digest_of(tmp_path / "one", texts)
    assert digest == digest_of(tmp_path / "later", texts, time=1_700_000_000)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    assert digest == data_digest(WebdatasetSource.open(tmp_path / "copy"))
    for changed in (0, 17, 29, 30, 44, 59):  # all samples of a small data set count
        other = [b"xxxx" if number == changed else text for number, text in enumerate(texts)]
        assert digest != digest_of(tmp_path / f"other-{changed}", other)


def test_neighbours_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening must not wait for one read a sample, which slow storage would make of it."""
    reads: list[int] = []
    fetch = ShardStore.fetch

    def counted(store: ShardStore, ranges: Any) -> Any:
        reads.extend(size for (path, _), _, size in ranges if path.endswith(".tar"))
        return fetch(store, ranges)

    monkeypatch.setattr(ShardStore, "fetch", counted)
    digest_of(tmp_path / "small", [b"text"] * 60)  # four places, none of which is in two shards
    assert len(reads) == 4
    digest_of(tmp_path / "large", [b"text" * 20_000] * 60)
    assert reads[4:] == [1 << 16] * 4
