from __future__ import annotations

import gc
import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import DatasetError, TrustError, UsageError
from energon_lite.extras.tools import PackedList, packed_list
from energon_lite.storage.files.array_file import BLOCK, read_arrays, write_arrays
from tests.accidents import beside, damaged, forked
from tests.extras.tools.list_work import read_packed, read_plain, record
from tests.private_memory import private_growth
from tests.testing import until

scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
)
keys = st.text(max_size=3) | st.integers(-9, 9) | st.binary(max_size=3) | st.tuples(st.integers(0, 3))
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys.filter(lambda key: not isinstance(key, tuple)), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    """Equal, in kind too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    return bool(one == other)


@given(st.lists(values, max_size=6))
def test_what_is_packed_comes_back(items: list[Any]) -> None:
    packed = PackedList.from_iterable(items)
    assert len(packed) == len(items) and same(list(packed), items)
    assert all(same(packed[-1 - place], items[-1 - place]) for place in range(len(items)))


@given(
    st.integers(0, 9),
    st.integers(-11, 11) | st.none(),
    st.integers(-11, 11) | st.none(),
    st.sampled_from([-2, -1, 1, 3]),
)
def test_slices_are_lists_over_the_same_bytes(count: int, start: int | None, stop: int | None, step: int) -> None:
    packed, plain = PackedList.from_iterable(range(count)), list(range(count))
    part = packed[start:stop:step]
    assert isinstance(part, PackedList) and list(part) == plain[start:stop:step] and part.path == packed.path
    assert list(part[::-1]) == plain[start:stop:step][::-1]
    assert list(pickle.loads(pickle.dumps(part))) == list(part)
    assert list(reversed(packed)) == plain[::-1] and (3 in packed) == (3 in plain)
    for outside in (count, -count - 1):
        with pytest.raises(IndexError, match=f"item {outside} of {count}"):
            packed[outside]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.int16).reshape(3, 4),
        np.zeros((0, 5), dtype=np.float32),
        np.array(3.5),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(["a", "bcd"]),
        np.array(["2020-01-02"], dtype="datetime64[D]"),
        np.array([1, 2], dtype=">i4"),
        np.array([True, False]),
    ],
)
def test_arrays(array: np.ndarray) -> None:
    (item,) = PackedList.from_iterable([{"a": [array, b"x"]}])
    found = item["a"][0]
    assert type(found) is np.ndarray and found.dtype == array.dtype and found.shape == array.shape
    assert (found == array).all() and found.flags.writeable


def test_numpy_scalars_and_text_that_is_not_unicode() -> None:
    items = [np.float32(0.1), np.int64(-5), np.bool_(True), np.float64(0.1)]
    items += [np.str_("text"), os.fsdecode(b"caf\xe9.jpg")]
    assert same(list(PackedList.from_iterable(items)), items)


class TestErrors:
    @pytest.mark.parametrize(
        ("item", "message"),
        [
            (
                {"a": 1, "b": [0, {"c": Fraction(1, 2)}]},
                r"item 2 cannot be packed, because of \['b'\]\[1\]\['c'\]: a fractions.Fraction",
            ),
            (Fraction(1), r"item 2 cannot be packed: a fractions.Fraction is not one of the kinds"),
            ((1, {2}), r"because of \[1\]: a set is not"),
            ([2**64], r"because of \[0\]: "),
            (np.array([None]), "a numpy.ndarray is not"),
            (np.zeros(2, dtype=[("x", "i4")]), "a numpy.ndarray is not"),
            (np.zeros(2, dtype=[("x", "i4")])[0], "a numpy.void is not"),
            (OrderedDict(a=1), "a collections.OrderedDict is not"),
        ],
    )
    def test_says_which_item_and_what_in_it(self, tmp_path: Path, item: Any, message: str) -> None:
        with pytest.raises(UsageError, match=message) as caught:
            PackedList.from_iterable([0, 1, item, 3], tmp_path / "x.pack")
        assert "trust_code=True" in str(caught.value) and not list(tmp_path.iterdir())

    def test_nested_too_deeply(self) -> None:
        item: list[Any] = []
        for _ in range(5000):
            item = [item]
        with pytest.raises(UsageError, match="item 0 cannot be packed: it is nested too deeply"):
            PackedList.from_iterable([item])

    def test_an_iterable_that_fails_leaves_no_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

        def items() -> Iterator[int]:
            yield 1
            raise OSError("lost")

        for path in (None, tmp_path / "x.pack"):
            with pytest.raises(OSError, match="lost"):
                PackedList.from_iterable(items(), path)
        assert not list(tmp_path.iterdir())


class Evil:
    """Its pickle makes a file."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


class TestTrust:
    @given(data=st.data())
    def test_any_damage_is_an_error_or_changes_nothing(self, tmp_path: Path, data: st.DataObject) -> None:
        path = tmp_path / "list"
        items = [{"a": [1, 2.5, "x"]}, [3, "y" * 9000], b"bytes", {1: (None, True)}]
        PackedList.from_iterable(items, path)
        path.write_bytes(damaged(data, path.read_bytes()))
        try:
            made = PackedList.open(path)
        except DatasetError as error:
            assert error.fix and error.where == str(path)
            return
        assert len(made) == len(items)
        for number, item in enumerate(items):
            try:
                assert made[number] == item
            except DatasetError as error:
                assert error.fix and error.where == str(path)

    def test_each_block_is_verified(self, tmp_path: Path) -> None:
        path = tmp_path / "list"
        PackedList.from_iterable([bytes([number]) * BLOCK for number in range(4)], path)
        whole = path.read_bytes()
        end = whole.rindex(b"\1" * 9) + 8  # the last byte of item 1: in a block that item 0 does not touch
        path.write_bytes(whole[:end] + b"x" + whole[end + 1 :])
        made = PackedList.open(path)
        assert made[0] == bytes(BLOCK) and made[3] == b"\3" * BLOCK
        with pytest.raises(DatasetError):
            made[1]

    def test_pickles_only_where_allowed(self, tmp_path: Path) -> None:
        items = [Fraction(1, 3), {"set": {1, 2}}, OrderedDict(a=1)]
        packed = PackedList.from_iterable(items, tmp_path / "x.pack", trust_code=True)
        assert list(packed) == items == list(pickle.loads(pickle.dumps(packed)))
        assert list(PackedList.open(tmp_path / "x.pack", trust_code=True)) == items
        with pytest.raises(TrustError, match="holds pickles"):
            PackedList.open(tmp_path / "x.pack")
        PackedList.from_iterable([{"a": (1, np.zeros(2))}], tmp_path / "y.pack", trust_code=True)
        assert len(PackedList.open(tmp_path / "y.pack")) == 1, "trust alone makes no pickles"

    def test_a_forged_table_runs_nothing(self, tmp_path: Path) -> None:
        path, trace = tmp_path / "x.pack", tmp_path / "trace"
        PackedList.from_iterable([[Evil(str(trace))]], path, trust_code=True)
        arrays, _ = read_arrays(str(path), packed_list._LIST_FILE)
        write_arrays(str(path), packed_list._LIST_FILE, arrays, {"pickles": False})
        with pytest.raises(TrustError):
            PackedList.open(path)[0]
        assert not trace.exists()


class TestFiles:
    def test_saved_and_opened(self, tmp_path: Path) -> None:
        packed = PackedList.from_iterable({"n": n} for n in range(300))
        for part, name in ((packed, "all"), (packed[10:20], "ten"), (packed[::-1], "back"), (packed[:0], "none")):
            saved = part.save(tmp_path / name)
            assert saved.path == str(tmp_path / name)
            assert list(saved) == list(PackedList.open(tmp_path / name)) == list(part)
        assert (tmp_path / "ten").stat().st_size < (tmp_path / "all").stat().st_size / 5

    def test_equal_items_give_equal_files(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            PackedList.from_iterable(({"n": n} for n in range(9)), tmp_path / name)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    def test_the_temporary_file_goes_with_the_last_slice(self) -> None:
        packed = PackedList.from_iterable(range(10))
        path, part = packed.path, packed[3:5]
        copy = pickle.loads(pickle.dumps(packed))
        del packed
        gc.collect()
        assert os.path.exists(path) and list(part) == [3, 4]
        parts = [part]
        del part
        # a forked copy that lets go of it
        assert os.waitpid(forked(lambda: (parts.clear(), gc.collect())), 0)[1] == 0 and os.path.exists(path)
        parts.clear()
        gc.collect()
        assert not os.path.exists(path) and list(copy) == list(range(10))  # what is mapped stays

    @pytest.mark.parametrize("when", ["whole", "half"])
    def test_the_file_of_a_process_that_was_killed_goes_with_the_next_list(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
    ) -> None:
        """SIGKILL lets nobody clean up; what a living process uses, or somebody else made, stays."""
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(packed_list, "_cleaned", set())

        def make(then: Callable[[], object]) -> object:
            """A list, or half of one; and then something else."""
            return PackedList.from_iterable([1, 2] if when == "whole" else (then() for _ in range(1))), then()

        os.waitpid(forked(lambda: make(lambda: os.kill(os.getpid(), signal.SIGKILL))), 0)
        (left,) = tmp_path.glob("*.pack")
        with beside(lambda: make(signal.pause)):
            living = until(lambda: {*tmp_path.glob("*.pack")} - {left})
            assert until(lambda: not left.exists())  # the list of the second process took it away
            (tmp_path / "energon_lite-link.pack").symlink_to(tmp_path / "mine")
            os.mkfifo(tmp_path / "energon_lite-fifo.pack")
            (tmp_path / "mine").write_bytes(b"mine")
            (tmp_path / "energon_lite-notes.txt").write_bytes(b"of somebody else")
            made = PackedList.from_iterable([3])
            assert living < set(tmp_path.glob("*.pack")) and len(living) == 1 and os.path.exists(made.path)
            assert (tmp_path / "mine").exists() and (tmp_path / "energon_lite-notes.txt").exists()
        monkeypatch.setattr(packed_list, "_cleaned", set())
        again = PackedList.from_iterable([4])
        assert not living & set(tmp_path.glob("*.pack")) and list(made) == [3] and list(again) == [4]

    def test_a_file_that_another_process_takes_for_a_leftover(self, monkeypatch: pytest.MonkeyPatch) -> None:
        make, made = tempfile.mkstemp, list[tuple[int, str]]()

        def taken_at_first(*arguments: str) -> tuple[int, str]:
            made.append(make(*arguments))
            if len(made) == 1:
                os.unlink(made[0][1])
            return made[-1]

        monkeypatch.setattr(tempfile, "mkstemp", taken_at_first)
        packed = PackedList.from_iterable([1])
        assert list(packed) == [1] and packed.path == made[1][1] and made[0][0] == made[1][0]  # the first was closed

    def test_leftovers_beside_a_named_file(self, tmp_path: Path) -> None:
        items = (os.kill(os.getpid(), signal.SIGKILL) for _ in range(1))
        os.waitpid(forked(lambda: PackedList.from_iterable(items, tmp_path / "a.pack")), 0)
        assert len(list(tmp_path.iterdir())) == 1
        PackedList.from_iterable([1], tmp_path / "b.pack")
        assert [path.name for path in tmp_path.iterdir()] == ["b.pack"]

    def test_more_offsets_than_are_kept_in_memory(self) -> None:
        buffered = io.DEFAULT_BUFFER_SIZE // 8
        for count in (buffered - 2, buffered - 1, buffered, 5 * buffered):
            assert list(PackedList.from_iterable(range(count))) == list(range(count))

    def test_making_it_takes_no_memory(self, tmp_path: Path) -> None:
        def items() -> Iterator[dict[str, Any]]:
            for number in range(100_000):
                yield {"id": number, "text": "x" * 100}

        tracemalloc.start()
        PackedList.from_iterable(items(), tmp_path / "x.pack")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (tmp_path / "x.pack").stat().st_size > 11 << 20 and peak < 3 << 20

    def test_the_format(self, tmp_path: Path) -> None:
        PackedList.from_iterable(["a", 5], tmp_path / "x.pack")
        arrays, meta = read_arrays(str(tmp_path / "x.pack"), packed_list._LIST_FILE)
        items, offsets = arrays["items"].tobytes(), arrays["offsets"]
        assert offsets.dtype == np.uint64 and offsets.tolist() == [0, 2, 3] and meta == {"pickles": False}
        assert [msgpack.unpackb(items[a:b]) for a, b in ((0, 2), (2, 3))] == ["a", 5]


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux")
@pytest.mark.parametrize("count", [200_000, pytest.param(1_000_000, marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_workers_share_it(count: int, tmp_path: Path) -> None:
    PackedList.from_iterable(map(record, range(count)), tmp_path / "x.pack")
    shared = private_growth(read_packed, str(tmp_path / "x.pack"), count)
    plain = private_growth(read_plain, count)
    print(f"\n{count} items: packed {max(shared) / 2**20:.1f} MiB, list {min(plain) / 2**20:.1f} MiB a worker")
    assert max(shared) < 20 << 20
    assert min(plain) > 200 * count and min(plain) > 10 * max(shared)


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    packed = PackedList.from_iterable(map(record, range(1000)))[10:]
    assert len(pickle.dumps(packed)) < 300
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(packed))
    program = "import pickle, sys; p = pickle.load(open(sys.argv[1], 'rb')); print(p[0]['id'], len(p), *sys.modules)"
    command = [sys.executable, "-c", program, tmp_path / "x.pkl"]
    options = {"capture_output": True, "text": True, "env": os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}}
    said = subprocess.run(command, check=True, **options).stdout.split()
    assert said[:2] == ["10", "990"] and "torch" not in said
    assert os.path.exists(packed.path)
