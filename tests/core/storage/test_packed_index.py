"""The packed index, the keys of its samples, and columns beside it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import DataIndexError, UsageError
from energon_lite.storage.files import stored_array
from energon_lite.storage.index import key_index
from energon_lite.storage.index.column_file import Ragged, RaggedFile, column_folders, write_column_file
from energon_lite.storage.index.columns import Column, write_column
from energon_lite.storage.index.index_cache import open_index
from energon_lite.storage.index.key_index import KeyIndex, hash_key, hash_keys
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.prepare import prepare_dataset
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.tar_scan import ShardScan
from tests.accidents import damaged
from tests.testing import examples, write_members

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


def test_tables_that_contradict_each_other(tmp_path: Path) -> None:
    index = PackedIndex.from_scans([scan_of("a.tar", [("0", [(512, 3, "txt")])])])
    arrays = {**index._arrays, "samples": index.samples[:] + 1}  # the closing row now claims another part
    PackedIndex(arrays, index.part_names, index.uuid, index.digest, {}).write(str(tmp_path / "i.idx"))
    with pytest.raises(DataIndexError, match="do not fit together"):
        PackedIndex.open(str(tmp_path / "i.idx"))


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


# -- samples are found by their keys, whatever these are, and however many samples share one


def index_of(*shards: list[str]) -> PackedIndex:
    return PackedIndex.from_scans([scan_of(f"{n}.tar", [(key, []) for key in keys]) for n, keys in enumerate(shards)])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENERGON_LITE_CACHE", os.fspath(tmp_path / "cache"))
    return tmp_path / "cache"


KEYS = st.lists(st.text(st.sampled_from("ab/.0ü\udcff"), min_size=1, max_size=6), max_size=30)


@settings(max_examples=examples(60))
@given(KEYS, KEYS)
def test_each_key_is_found_where_it_is(first: list[str], second: list[str]) -> None:
    keys = first + second
    found = KeyIndex(index_of(first, second))
    for key in {*keys, "no such", "a"}:
        assert found.find(key) == [number for number, one in enumerate(keys) if one == key]


def test_many_keys_and_what_is_not_among_them(cache: Path) -> None:
    keys = [f"folder/{number:07d}" for number in range(200_000)]
    index = index_of(keys)
    found = KeyIndex(index)
    wanted = [0, 1, 77_777, 131_071, 131_072, 199_999]
    assert [found.find(keys[number]) for number in wanted] == [[number] for number in wanted]
    assert found.find("folder/0200000") == found.find("") == []
    assert [path.name for path in (cache / "keys").iterdir()] == [f"{index.digest}.keys"]


def test_equal_hashes_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "_mixed", lambda values: np.full_like(values, 7 << 60))
    found = KeyIndex(index_of([f"{number}" for number in range(2000)]))
    assert found.find("1999") == [1999] and found.find("2000") == []


def test_hashes_are_spread_and_do_not_depend_on_neighbours() -> None:
    keys = [f"{number:08d}" for number in range(4096)]
    hashes, others = hash_keys(index_of(keys[:1000], keys[1000:]), np.arange(4096), words=2)
    assert len(np.unique(hashes)) == len(np.unique(others)) == len(keys) and not (hashes == others).any()
    assert [hash_key(key) for key in keys[::512]] == hashes[::512].tolist()
    counts = np.bincount((hashes >> np.uint64(60)).astype(np.int64), minlength=16)
    assert counts.min() > 180 and counts.max() < 340


def test_a_damaged_file_is_made_again_and_none_is_needed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of(["a", "b"])
    KeyIndex(index)
    (path,) = (cache / "keys").iterdir()
    path.write_bytes(b"nonsense")
    assert KeyIndex(index).find("b") == [1] and path.stat().st_size > 8
    cache.rename(cache.parent / "moved")
    cache.write_text("no folder can be made here")
    assert KeyIndex(index).find("b") == [1]


# -- columns

VALUES = np.arange(10, dtype=np.int32) * 11


def prepare(folder: Path) -> None:
    prepare_dataset(folder, split_ratio="1,0,0", force_overwrite=True, sqlite=False)


def column_of(folder: Path, name: str = "length") -> Column:
    return WebdatasetSource.open(folder).column(name)


def test_as_an_array(data: Path) -> None:
    path = write_column(data, "length", VALUES)
    column = column_of(data)
    assert path == str(data / ".nv-meta/energon_lite.columns/length.col")
    assert (len(column), column.shape, column.dtype, column.name) == (10, (10,), np.int32, "length")
    assert np.asarray(column).tolist() == list(column) == VALUES.tolist()
    assert column[3] == column[np.int64(3)] == column[-7] == 33
    assert column[np.array([[9, 0], [-1, 4]])].tolist() == [[99, 0], [99, 44]]
    assert column[[]].tolist() == []
    for key in (10, -11, [0, 10]):
        with pytest.raises(IndexError):
            column[key]
    for key in ([True] * 10, 1.5, "a"):
        with pytest.raises(TypeError):
            column[key]


@given(st.integers(-12, 12) | st.none(), st.integers(-12, 12) | st.none(), st.integers(-3, 3).filter(bool))
def test_slices(ten: Path, start: int | None, stop: int | None, step: int) -> None:
    if not (ten / ".nv-meta").exists():
        prepare(ten)
        write_column(ten, "length", VALUES)
    for shards in (None, ["sub/c.tar", "a.tar", "b.tar"]):
        column = WebdatasetSource.open(ten, shards=shards).column("length")
        whole = np.asarray(column)
        assert column[start:stop:step].tolist() == whole[start:stop:step].tolist()


def test_the_fingerprint_is_that_of_the_values(data: Path) -> None:
    write_column(data, "length", VALUES)
    before = column_of(data).fingerprint
    part = WebdatasetSource.open(data, shards=["a.tar"])
    first = part.column("length").fingerprint
    write_column(data, "length", VALUES)
    assert column_of(data).fingerprint == before
    write_column(data, "length", np.append(VALUES[:-1], 0).astype(np.int32))
    assert column_of(data).fingerprint != before
    assert part.column("length").fingerprint == first  # another shard has changed


def test_the_fingerprint_of_a_ragged_column_is_that_of_values_and_counts(data: Path, tmp_path: Path) -> None:
    index, values = open_index(str(data))[0], np.arange(8, dtype=np.int32).reshape(4, 2)
    path, prints = str(tmp_path / "boxes.ragged"), []
    for counts in ([4, 0, 0, 0], [1, 1, 2, 0], [4, 0, 0, 0]):
        blocks = [Ragged(np.array(counts), values), None, Ragged(np.array([0, 1, 0]), values[:1])]
        write_column_file(path, "boxes", index, lambda blocks=blocks: blocks, dtype="<i4", width=2, maker={})
        file = RaggedFile(path)
        assert file.take(np.array([9, 8, 0])).counts.tolist() == [0, 1, counts[0]]
        found = [file.block(*edges).counts.tolist() for edges in ((0, 4), (4, 7), (7, 10))]
        assert found == [counts, [0, 0, 0], [0, 1, 0]]
        assert file.take(np.array([2])).values.tolist() == values[sum(counts[:2]) : sum(counts[:3])].tolist()
        prints.append([file.fingerprint([row]) for row in range(3)])
        assert set(file.unchanged(index)) == {0, 2}
    assert prints[0] == prints[2] != prints[1] and prints[0][1:] == prints[1][1:]


def test_a_column_that_is_not_there(data: Path) -> None:
    with pytest.raises(DataIndexError, match=r"no column 'length'\n[\s\S]*energon-lite measure"):
        column_of(data)
    write_column(data, "weight", VALUES / 7)
    with pytest.raises(DataIndexError, match="no column 'length'; it has weight"):
        column_of(data)
    assert column_of(data, "weight")[9] == 99 / 7


def test_a_shard_that_has_other_contents_of_the_same_shape(data: Path) -> None:
    write_column(data, "length", VALUES)
    index = open_index(str(data))[0]
    old = (data / "a.tar").stat()
    members = [(f"{n}.{part}", text) for n in range(4) for part, text in (("txt", f"TEXT {n}".encode()), ("cls", b"7"))]
    write_members(data / "a.tar", members)
    os.utime(data / "a.tar", ns=(old.st_atime_ns, old.st_mtime_ns + 5))
    prepare(data)
    assert open_index(str(data))[0].digest == index.digest  # only the time tells
    with pytest.raises(DataIndexError, match=r"older than the data set[\s\S]*length.col"):
        column_of(data)


def test_a_folder_that_is_prepared_again_without_a_change_and_a_copy_have_it(data: Path, tmp_path: Path) -> None:
    write_column(data, "length", VALUES)
    prepare(data)
    assert np.asarray(column_of(data)).tolist() == VALUES.tolist()
    shutil.copytree(data, tmp_path / "copy", copy_function=shutil.copyfile)
    assert np.asarray(column_of(tmp_path / "copy")).tolist() == VALUES.tolist()
    assert column_of(tmp_path / "copy").fingerprint == column_of(data).fingerprint


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "too short"),
        (lambda data: data + b"x", "too short or too long"),
        (lambda data: data[:10], "this is not a {name}"),
        (lambda data: b"PK" + data[2:], "this is not a {name}"),
        (lambda data: data[:12] + b"\x63" + data[13:], "format 99, this library reads format 3"),
        (lambda data: data[:-2] + b"!" + data[-1:], "wrong checksum"),
    ],
)
def test_damage_is_named(data: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    column, index = Path(write_column(data, "length", VALUES)), data / ".nv-meta/energon_lite.idx"
    for path, name, cure, read in (
        (column, "column", "measure again", lambda: column_of(data)),
        (index, "packed index", "prepare", lambda: PackedIndex.open(str(index))),
    ):
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(DataIndexError, match=rf"{message.format(name=name)}[\s\S]*{path}[\s\S]*{cure}"):
            read()


@pytest.mark.parametrize("dtype", ["<i4", "<i8", "|u1", "<f4", ">i4"])
def test_types(data: Path, dtype: str) -> None:
    write_column(data, "x", VALUES.astype(dtype), maker={"by": "hand"})
    column = column_of(data, "x")
    assert list(column) == VALUES.astype(dtype).tolist() and column.maker == {"by": "hand"}
    assert column.dtype.byteorder in "=|<"


def test_equal_values_give_equal_files(data: Path) -> None:
    one, other = (Path(write_column(data, "length", VALUES)).read_bytes() for _ in range(2))
    assert one == other
    assert [path.name for path in (data / ".nv-meta/energon_lite.columns").iterdir()] == ["length.col"]


def test_wrong_values(data: Path) -> None:
    with pytest.raises(UsageError, match=r"shape \[9\] for 10 samples"):
        write_column(data, "length", VALUES[:9])
    with pytest.raises(UsageError, match="object values"):
        write_column(data, "length", np.array([None] * 10))
    for name in ("", "a/b", ".x", "x" * 101):
        with pytest.raises(UsageError, match="cannot be called"):
            write_column(data, name, VALUES)


def test_beside_the_cache_if_the_data_cannot_be_written(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    (data / ".nv-meta/energon_lite.columns").write_text("in the way of a folder")
    path = write_column(data, "length", VALUES)
    assert path.startswith(str(tmp_path / "cache")) and column_folders(str(data))[1] == os.path.dirname(path)
    assert np.asarray(column_of(data)).tolist() == VALUES.tolist()
    (data / ".nv-meta/energon_lite.columns").unlink()
    write_column(data, "length", VALUES + 1)  # beside the data now, which goes first
    assert column_of(data)[0] == 1
