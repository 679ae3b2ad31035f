"""Parquet and Arrow files as sources, and which files a path means; Lance data sets."""

from __future__ import annotations

import importlib.util
import math
import pickle
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import EnergonLiteError
from energon_lite.errors import (
    DataIndexError,
    DatasetError,
    EmptyDatasetError,
    MissingShardError,
    NotPreparedError,
    ShardChangedError,
    ShardFormatError,
    UsageError,
)
from energon_lite.extras.formats import arrow_files, held_files, lance
from energon_lite.extras.formats.tables import find_files, open_source
from tests.tables_by_hand import write_table
from tests.testing import examples

pa = pytest.importorskip("pyarrow")
KINDS = ("parquet", "arrow", "stream.arrow")

VALUES = {
    pa.int64(): st.none() | st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.none() | st.floats(allow_nan=False),
    pa.string(): st.none() | st.text(max_size=4),
    pa.binary(): st.none() | st.binary(max_size=4),
    pa.dictionary(pa.int32(), pa.string()): st.none() | st.sampled_from(["a", "bc", ""]),
    pa.bool_(): st.none() | st.booleans(),
    pa.list_(pa.int32()): st.none() | st.lists(st.integers(0, 9), max_size=3),
    pa.list_(pa.float32(), 2): st.lists(st.integers(0, 9), min_size=2, max_size=2),
    pa.list_(pa.list_(pa.int8())): st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=2),
    pa.list_(pa.string()): st.lists(st.none() | st.text(max_size=2), max_size=2),
    pa.struct({"bytes": pa.binary(), "path": pa.string()}): st.none()
    | st.fixed_dictionaries({"bytes": st.binary(max_size=3), "path": st.none() | st.text(max_size=2)}),
}


@st.composite
def tables(draw: Any) -> Any:
    rows = draw(st.integers(1, 12))
    kinds = draw(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=4))
    columns = [draw(st.lists(VALUES[kind], min_size=rows, max_size=rows)) for kind in kinds]
    arrays = [pa.array(values, kind) for kind, values in zip(kinds, columns, strict=True)]
    return pa.table(arrays, list("abcd")[: len(kinds)])


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


@settings(max_examples=examples(40))
@given(tables(), st.sampled_from(KINDS), st.integers(1, 5), st.data())
def test_any_table_comes_back_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, table: Any, kind: str, rows: int, data: Any
) -> None:
    folder = tmp_path_factory.mktemp("table")
    cut = data.draw(st.integers(0, len(table)))
    for number, part in enumerate((table.slice(0, cut), table.slice(cut))):
        write_table(folder / f"part-{number}.{kind}", part, rows)
    source = open_source(str(folder), "train")
    wanted = data.draw(st.lists(st.integers(0, len(table) - 1), max_size=9))
    expected = table.to_pylist()
    assert len(source) == len(table)
    for index in wanted:
        found = source.read(index)
        assert {name: plain(value) for name, value in found.items()} == expected[index]
        place, _ = source.locate(index)
        assert source.shard_names[place] == f"part-{int(index >= cut)}.{kind}"
    found = pickle.loads(pickle.dumps(source)).read_many(wanted)
    taken = table.take(pa.array(wanted, pa.int64())).to_pydict()
    assert {name: [plain(value) for value in values] for name, values in found.items()} == taken
    chosen = frozenset(table.column_names[-1:])
    assert source.select(chosen).read(0).keys() == source.select(chosen).part_names == chosen
    assert source.select(chosen).identity == source.identity


@pytest.mark.parametrize("kind", KINDS)
def test_lists_of_numbers_are_arrays_of_their_own(tmp_path: Path, kind: str) -> None:
    kinds = {"tokens": pa.list_(pa.uint16()), "x": pa.large_list(pa.float32())}
    lists = {name: pa.array([[1, 2], [3], [], [4, 5, 6]], kind) for name, kind in kinds.items()}
    table = pa.table({**lists, "n": [2, 1, 0, 3], "pair": pa.array([[1, 2]] * 4, pa.list_(pa.float64(), 2))})
    source = open_source(str(write_table(tmp_path / f"a.{kind}", table)), "train")
    first = source.read(0)["tokens"]
    assert first.dtype == np.uint16 and first.tolist() == [1, 2]
    first += 7
    found = source.read_many([0, 2])
    assert found["tokens"][0].tolist() == [1, 2] and found["x"][1].dtype == np.float32
    assert found["pair"][0].dtype == np.float64 and source.column("pair").tolist() == [2] * 4
    assert [source.column(name).tolist() for name in ("n", "tokens", "x")] == [[2, 1, 0, 3]] * 3
    with pytest.raises(DataIndexError, match="no column 'm'") as error:
        source.column("m")
    assert "n" in str(error.value.fix)


@pytest.mark.parametrize("kind", KINDS)
def test_values_do_not_depend_on_the_rows_that_are_read_with_them(tmp_path: Path, kind: str) -> None:
    rows = [[1, 2], None, [3, None], [4]]
    table = pa.table(
        {"tokens": pa.array(rows, pa.list_(pa.int32())), "pair": pa.array(rows[:2] * 2, pa.list_(pa.int8(), 2))}
    )
    source = open_source(str(write_table(tmp_path / f"a.{kind}", table)), "train")
    for name, values in source.read_many([3, 2, 0, 1]).items():
        alone = [source.read(row)[name] for row in (3, 2, 0, 1)]
        assert [type(value) for value in values] == [type(value) for value in alone]
        assert [None if value is None else list(value) for value in values] == [
            table[name][row].as_py() for row in (3, 2, 0, 1)
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_views_of_text_and_bytes(tmp_path: Path, kind: str) -> None:
    """Polars writes them."""
    table = pa.table(
        {
            "text": pa.array(["a", None, "c" * 20], pa.string_view()),
            "file": pa.array([b"x", b"", None], pa.binary_view()),
        }
    )
    source = open_source(str(write_table(tmp_path / f"a.{kind}", table)), "train")
    assert source.read_many([2, 0, 1]) == {"text": ["c" * 20, "a", None], "file": [None, b"x", b""]}


def test_columns_that_are_no_lengths(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"], "holes": [1, None]})
    source = open_source(str(write_table(tmp_path / "a.parquet", table)), "train")
    for name in ("text", "holes"):
        with pytest.raises(UsageError, match=f"column '{name}' has no lengths"):
            source.column(name)


def test_files_of_one_data_set_have_the_same_columns(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", pa.table({"a": [1], "b": [2]}))
    write_table(tmp_path / "b.parquet", pa.table({"a": [1], "c": [2]}))
    with pytest.raises(DatasetError, match="b, c are in one only") as error:
        open_source(str(tmp_path), "train")
    assert str(error.value.where).endswith("b.parquet")


def test_identity_is_that_of_the_contents(tmp_path: Path) -> None:
    one = write_table(tmp_path / "a.parquet", pa.table({"a": [1, 2]}))
    same = write_table(tmp_path / "copy" / "b.parquet", pa.table({"a": [1, 2]}))
    other = write_table(tmp_path / "c.parquet", pa.table({"a": [1, 3]}))
    identities = [open_source(str(path), "train").identity for path in (one, same, other)]
    assert identities[0] == identities[1] != identities[2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_was_replaced_is_noticed(tmp_path: Path, kind: str) -> None:
    path = write_table(tmp_path / f"a.{kind}", pa.table({"a": [1, 2]}))
    source = pickle.loads(pickle.dumps(open_source(str(path), "train")))
    write_table(path, pa.table({"a": [1, 2], "b": ["long " * 100, "x"]}))
    with pytest.raises(ShardChangedError):
        source.read(0)
    path.unlink()
    with pytest.raises(MissingShardError):
        pickle.loads(pickle.dumps(source)).read(0)


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_were_cut_short(tmp_path: Path, kind: str) -> None:
    path = write_table(tmp_path / f"a.{kind}", pa.table({"a": list(range(40)), "t": ["text"] * 40}))
    data = path.read_bytes()
    for stop in (0, 3, 7, 11, 100, len(data) // 2, len(data) - 9, len(data) - 3):
        path.write_bytes(data[:stop])
        try:
            found = open_source(str(path), "train").read_many(range(40))
        except (ShardFormatError, IndexError) as error:
            assert isinstance(error, ShardFormatError) and error.where == str(path)
        else:  # what was cut off is not needed
            assert kind != "parquet" and found["a"] == list(range(40))


@settings(max_examples=examples(60))
@given(st.sampled_from(KINDS), st.integers(0, 10**6), st.integers(1, 255))
def test_flipped_bytes_give_our_error_or_values(
    tmp_path_factory: pytest.TempPathFactory, kind: str, place: int, flip: int
) -> None:
    path = tmp_path_factory.mktemp("flip") / f"a.{kind}"
    table = pa.table({"a": list(range(40)), "t": [f"text {n}" for n in range(40)], "l": [[n] for n in range(40)]})
    data = bytearray(write_table(path, table, 9).read_bytes())
    data[place % len(data)] ^= flip
    path.write_bytes(data)
    try:
        source = open_source(str(path), "train")
        for index in range(min(len(source), 40)):
            source.read(index)
    except EnergonLiteError as error:
        assert str(error.where) == str(path) and error.fix


@pytest.mark.parametrize("kind", KINDS)
def test_a_schema_that_is_longer_than_a_first_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    names = [f"column {number}" for number in range(500)]
    path = write_table(tmp_path / f"a.{kind}", pa.table([pa.array([7])] * 500, names), 1)
    footer = int.from_bytes(path.read_bytes()[-8:-4], "little")
    for tail in (1 << 16, footer + 8, footer + 7, footer, 12):
        monkeypatch.setattr(arrow_files, "_PARQUET_TAIL", tail)
        source = open_source(str(tmp_path), "train")
        assert source.read(0) == dict.fromkeys(names, 7)
        assert source.mean_bytes == sum(source.files[0].column_bytes.values()) > 500 * 8


@pytest.mark.parametrize("kind", ["arrow", "stream.arrow"])
def test_batches_without_rows_and_with_less(tmp_path: Path, kind: str) -> None:
    path, make = tmp_path / f"a.{kind}", pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
    make(str(path), pa.schema({"a": pa.int64()})).close()
    assert open_source(str(path), "train").column("a").tolist() == []
    with make(str(path), pa.schema({"a": pa.int64()})) as writer:
        for rows in ([1, 2], [], [3]):
            writer.write_batch(pa.RecordBatch.from_pydict({"a": pa.array(rows, pa.int64())}))
    source = open_source(str(path), "train")
    assert source.read_many([2, 0])["a"] == [3, 1] and [source.locate(row) for row in (1, 2)] == [(0, 0), (0, 2)]
    path.write_bytes(path.read_bytes().replace((2).to_bytes(8, "little"), (-2).to_bytes(8, "little", signed=True)))
    with pytest.raises(ShardFormatError, match="a message cannot be read"):
        open_source(str(path), "train")


@pytest.mark.parametrize("kind", ["arrow", "stream.arrow"])
def test_messages_that_end_early_are_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    write_table(path, pa.table({"a": list(range(10))}), 2)
    data, mark = path.read_bytes(), b"\xff" * 4
    places = [at for at in range(0, len(data), 8) if data[at : at + 4] == mark and any(data[at + 4 : at + 8])]
    assert len(places) == 6  # the schema and five batches
    for stop in (places[2] + 12, places[3] - 1):  # in the header, or in the body
        path.write_bytes(data[:stop])
        with pytest.raises(ShardFormatError, match=f"it ends in the message at byte {places[2]}"):
            open_source(str(path), "train")
    for at in places[1:]:
        for end in (bytes(8), bytes(4) + b"\1\0\0\0", mark + bytes(4)):
            path.write_bytes(data[:at] + end + data[at + 8 :])
            with pytest.raises(ShardFormatError, match=r"its messages end at byte|its footer knows 5 batches"):
                open_source(str(path), "train")


def test_what_is_kept_decoded_is_bounded() -> None:
    class Piece:
        nbytes = 40

    held = held_files.HeldTables(100)
    for key in (1, 2, 1, 3, 1, 2):
        held.get(key, Piece)
    assert held.size == 80 and held.made == 4  # 2 went for 3, and came again
    held.get(4, lambda: type("Large", (), {"nbytes": 1000})())
    assert held.size == 1000  # one is kept, whatever its size


def test_row_groups_are_decoded_once_in_sequence(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", pa.table({"a": list(range(100))}), 10)
    source, before = open_source(str(path), "train"), held_files.held_tables().made
    for start in range(0, 100, 4):
        source.read_many(range(start, start + 4))
    assert held_files.held_tables().made - before == math.ceil(100 / 10)


# -- which files a path means -----------------------------------------------------------------------------------------


NAMES = [
    "train-00000-of-00002.parquet",
    "train-00001-of-00002.parquet",
    "validation-00000-of-00001.parquet",
    "deep/er/test.parquet",
    "readme.md",
    ".cache/train.parquet",
    "._train.parquet",
]


@pytest.fixture(params=["local", "memory"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    root = str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"
    for name in NAMES:
        with fsspec.open(f"{root}/{name}", "wb", auto_mkdir=True) as file:
            file.write(b"x")
    return root


def found(base: str, path: str, split: str = "train") -> list[str]:
    where = f"{base}/{path}".rstrip("/")
    return [file[len(base) + 1 :] for file in find_files(where, (".parquet",), split)]


def test_splits_by_the_names_of_files(base: str) -> None:
    assert found(base, "") == NAMES[:2]
    assert found(base, "", "val") == [NAMES[2]]
    assert found(base, "", "test") == [NAMES[3]]
    assert sorted(found(base, "", "")) == sorted(NAMES[:4])  # all, for `lint`
    with pytest.raises(EmptyDatasetError, match="no file belongs to split 'other'") as error:
        found(base, "", "other")
    assert "test, train, val" in str(error.value.fix)


def test_patterns_and_single_files(base: str) -> None:
    assert found(base, "train-*.parquet", "val") == NAMES[:2]  # as was asked for
    assert found(base, "*.parquet", "val") == [NAMES[2]]
    assert found(base, "**/*.parquet", "test") == [NAMES[3]]
    assert found(base, "train-0000[1-9]-*.parquet") == found(base, "train-0000[!0]-*.parquet") == [NAMES[1]]
    assert found(base, NAMES[2]) == [NAMES[2]]
    assert found(base, ".*/*.parquet") == found(base, "**/.cache/*.parquet") == [NAMES[5]]  # only if they are named
    for path in ("*.arrow", "nothing/*.parquet", "train-00000.of*.parquet", NAMES[0][:-1]):
        with pytest.raises(NotPreparedError, match="no files of this data set") as error:
            found(base, path)
        assert ("did you mean" in str(error.value.fix)) == (path == NAMES[0][:-1] and "://" not in base)


def test_folders_of_splits(tmp_path: Path) -> None:
    for name in ("train/0.parquet", "dev/0.parquet"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert found(str(tmp_path), "", "val") == ["dev/0.parquet"]
    assert found(str(tmp_path), "*/*.parquet", "train") == ["train/0.parquet"]
    assert found(str(tmp_path), "dev", "train") == ["dev/0.parquet"]


# -- Lance data sets, where ``pylance`` is installed; and what is said where it is not --------------------------------


@pytest.mark.skipif(importlib.util.find_spec("lance") is not None, reason="pylance is installed")
def test_without_the_package(tmp_path: Path) -> None:
    (tmp_path / "a.lance").mkdir()
    with pytest.raises(UsageError, match="need the package pylance") as error:
        lance.open_source(str(tmp_path / "a.lance"), "train")
    assert error.value.fix == "pip install 'energon-lite[lance]'"


def test_rows(tmp_path: Path) -> None:
    pylance = pytest.importorskip("lance")
    path = str(tmp_path / "a.lance")
    table = pa.table({"text": [f"t{n}" for n in range(9)], "tokens": [[n] * (n % 3) for n in range(9)]})
    pylance.write_dataset(table, path, max_rows_per_file=4)
    source = lance.open_source(path, "train")
    identity = source.identity
    assert len(source) == 9 and source.read(7)["text"] == "t7"
    assert source.read_many([8, 0, 4])["text"] == ["t8", "t0", "t4"]
    assert source.column("tokens").tolist() == [n % 3 for n in range(9)]
    assert pickle.loads(pickle.dumps(source)).select(frozenset(["text"])).read(1) == {"text": "t1"}
    with pytest.raises(DataIndexError, match="no column 'x'"):
        source.column("x")
    pylance.write_dataset(table, path, mode="append")
    assert len(lance.open_source(path, "train")) == 18 != len(source)
    assert lance.open_source(path, "train").identity != identity
