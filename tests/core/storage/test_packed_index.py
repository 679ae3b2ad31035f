from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import DataIndexError
from energon_lite.storage.files import stored_array
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar_scan import ShardScan
from tests.testing import damaged, examples

Samples = list[tuple[str, list[tuple[int, int, str]]]]


def scan_of(name: str, samples: Samples) -> ShardScan:
    """A scan as it would come from a tar with these (key, [(offset, size, part name)])."""
    names: dict[str, int] = {}
    parts = [(o, s, names.setdefault(n, len(names))) for _, rows in samples for o, s, n in rows]
    keys = [key.encode("utf-8", "surrogateescape") for key, _ in samples]
    return ShardScan(
        name=name,
        size=1000 + len(samples),
        head=7,
        end=999,
        headers=np.arange(len(samples), dtype=np.int64) * 512,
        first_part=np.cumsum([0, *(len(rows) for _, rows in samples)]).astype(np.int64),
        parts=np.array(parts, dtype=np.int64).reshape(-1, 3),
        part_names=tuple(names),
        key_offsets=np.cumsum([0, *map(len, keys)]).astype(np.int64),
        keys=b"".join(keys),
    )


rows = st.tuples(st.integers(0, 1 << 50), st.integers(0, 1 << 40), st.sampled_from(["jpg", "txt", "json", "a.b"]))
samples_of = st.lists(st.tuples(st.text(max_size=6), st.lists(rows, max_size=4)), max_size=6)


@given(st.lists(samples_of, max_size=5))
def test_what_is_packed_is_found(tmp_path: Path, shards: list[Samples]) -> None:
    scans = [scan_of(f"s/{number}.tar", samples) for number, samples in enumerate(shards)]
    made = PackedIndex.from_scans(scans, uuid="u-1")
    made.write(str(tmp_path / "i.idx"))
    flat = [sample for samples in shards for sample in samples]
    for index in (made, PackedIndex.open(str(tmp_path / "i.idx"))):
        assert len(index) == len(flat)
        assert index.shard_counts == {scan.name: scan.samples for scan in scans}
        assert index.shards[:-1, 0].tolist() == [scan.size for scan in scans]
        assert (index.uuid, index.digest) == ("u-1", made.digest)
        assert [list(index.scan(row).all_keys()) for row in range(len(shards))] == [[k for k, _ in s] for s in shards]
    index = PackedIndex.open(str(tmp_path / "i.idx"))
    for number, (key, parts) in enumerate(flat):
        assert index.key(number) == key
        found = index.key_and_part_rows(number)[1]
        assert [(o, s, index.part_names[n]) for o, s, n in zip(*[iter(found)] * 3, strict=True)] == parts


def test_digest_depends_on_contents_only() -> None:
    one = scan_of("a.tar", [("0", [(512, 3, "txt")])])
    other = scan_of("a.tar", [("0", [(512, 4, "txt")])])
    digests = [PackedIndex.from_scans([scan], uuid=uuid).digest for scan in (one, other) for uuid in ("x", "y")]
    assert digests[0] == digests[1] != digests[2] == digests[3]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    PackedIndex.from_scans([scan_of("a.tar", [("0", [(512, 3, "txt")])])]).write(str(tmp_path / "i.idx"))
    return tmp_path / "i.idx"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "too short"),
        (lambda data: data + b"x", "too short or too long"),
        (lambda data: data[:10], "not a packed index"),
        (lambda data: b"PK" + data[2:], "not a packed index"),
        (lambda data: data[:12] + b"\x63" + data[13:], "has format 99, this library reads format 3"),
        (lambda data: data[:-2] + b"!" + data[-1:], "wrong checksum"),
    ],
)
def test_damage_is_named(written: Path, damage: object, message: str) -> None:
    written.write_bytes(damage(written.read_bytes()))  # type: ignore[operator]
    with pytest.raises(DataIndexError, match=message) as caught:
        PackedIndex.open(str(written))
    assert str(written) in str(caught.value) and "prepare" in str(caught.value)


def test_tables_that_contradict_each_other(written: Path) -> None:
    index = PackedIndex.open(str(written))
    arrays = {**index._arrays, "samples": index.samples[:] + 1}  # the closing row now claims another part
    PackedIndex(arrays, index.part_names, index.uuid, index.digest, {}).write(str(written))
    with pytest.raises(DataIndexError, match="do not fit together"):
        PackedIndex.open(str(written))


FLIPPED: Samples = [(f"{n:03d}", [(1024 * n + 512, n % 7, "txt"), (3, 4, "cls")]) for n in range(150)]


def contents(path: Path) -> list[object]:
    index = PackedIndex.open(str(path))
    scans = [index.scan(row) for row in range(len(index.shard_names))]
    found: list[object] = [(index.key(n), index.key_and_part_rows(n)[1]) for n in range(len(index))]
    found += [index.samples.take(np.arange(len(index)), 0).tolist(), index.parts[:].tolist(), index.shards.tolist()]
    return [*found, [scan.all_keys() for scan in scans], index.shard_counts, index.uuid, index.digest, index.part_names]


@settings(max_examples=examples(300))
@given(st.data())
def test_flipped_bits_and_cuts_never_give_other_samples(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "i.idx"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_array, "_KEPT", data.draw(st.sampled_from([1, 256])))
        made = PackedIndex.from_scans([scan_of("a.tar", FLIPPED), scan_of("b.tar", FLIPPED[:3])], uuid="u")
        made.write(str(path))
        whole = contents(path)
        path.write_bytes(damaged(data, path.read_bytes()))
        with suppress(DataIndexError):  # never another sample, and no other exception
            assert contents(path) == whole


@pytest.mark.parametrize("keep", [0, 100, 4000])
def test_an_index_that_is_cut_short_while_it_is_used(tmp_path: Path, keep: int) -> None:
    """An error, where touching mapped memory would end the process."""
    path = str(tmp_path / "i.idx")
    PackedIndex.from_scans([scan_of("a.tar", FLIPPED * 20)]).write(path)
    index = PackedIndex.open(path)
    assert index.key(2999) == "149"
    stored_array._kept.clear()
    os.truncate(path, keep)
    with pytest.raises(DataIndexError, match=r"packed index cannot be read[\s\S]*start the run again"):
        index.key(2000)


def test_writing_is_atomic(written: Path) -> None:
    assert [path.name for path in written.parent.iterdir()] == ["i.idx"]
