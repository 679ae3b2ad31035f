"""Columns beside the length: what an encoder says of its samples, in one pass."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import TaskEncoder
from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.errors import DataIndexError, FatalSampleError
from energon_lite.loading.leaves import open_whole
from energon_lite.loading.makers.sample_length import SampleLength
from energon_lite.loading.measured_columns import Maker, MeasureReport
from energon_lite.loading.measuring import measure
from energon_lite.loading.measuring_runner import MeasuringRunner, columns_of
from energon_lite.storage.index.column_file import Ragged
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.accidents import killed_at_every_step
from tests.testing import examples


def values_of(data: Path, name: str) -> list[int]:
    return list(np.asarray(WebdatasetSource.open(data).column(name)).tolist())


class Costs(TaskEncoder):
    """Texts are numbers ``n``: the length, and ``n`` images of ``n`` patches each."""

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        return {"tokens": [0] * int(sample.text)}

    def sample_costs(self, encoded: dict[str, Any]) -> dict[str, Any]:
        length = len(encoded["tokens"])
        sizes = np.full((length, 2), length)
        return {"double": 2 * length, "sizes": sizes, "flat": [length] * length, **({"odd": 1} if length % 2 else {})}


@pytest.fixture
def texts(request: pytest.FixtureRequest, write_dataset: Callable[..., Path], tmp_path: Path) -> Path:
    count = getattr(request, "param", 300)
    shards = {f"{s}.tar": [(f"{s}{n}", {"txt": str(n % 5).encode()}) for n in range(count)] for s in "ab"}
    return write_dataset(tmp_path / "texts", shards)


def run(data: Path, encoder: TaskEncoder, code: str = "", **options: Any) -> MeasureReport:
    leaf = open_whole(LeafSpec(str(data), ""), encoder, False)
    options.setdefault("workers", 0)
    return measure(MeasuringRunner(leaf, encoder, SampleLength(encoder)), Maker({"by": "test"}, code), **options)


def check(data: Path, count: int = 300) -> None:
    lengths = [n % 5 for n in range(count)] * 2
    assert values_of(data, "length") == lengths
    assert values_of(data, "double") == [2 * n for n in lengths]
    assert values_of(data, "odd") == [n % 2 for n in lengths]
    sizes = WebdatasetSource.open(data).ragged_column("sizes")[:]
    assert sizes.counts.tolist() == lengths
    assert sizes.values.tolist() == [[n, n] for n in lengths for _ in range(n)]
    assert WebdatasetSource.open(data).ragged_column("flat")[:].values.shape == (sum(lengths), 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_an_encoder_says_of_its_samples(texts: Path, workers: int) -> None:
    report = run(texts, Costs(), workers=workers)
    check(texts)
    assert report.columns["double"] == (600, 2 * 1200, 8)
    assert run(texts, Costs()).known == 600
    run(texts, Costs(), name="mine")
    check(texts)


def test_a_column_that_the_encoder_says_no_more_is_removed(texts: Path) -> None:
    class Fewer(Costs):
        def sample_costs(self, encoded: dict[str, Any]) -> dict[str, Any]:
            return {"double": len(encoded["tokens"])}

    run(texts, Costs(), name="mine")
    run(texts, Costs())
    run(texts, Fewer(), "other code")
    with pytest.raises(DataIndexError, match="no column 'odd'"):
        values_of(texts, "odd")
    assert max(values_of(texts, "double")) == 4
    assert max(values_of(texts, "mine.odd")) == 1  # of another name


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *(({name: 1}, "cannot be called") for name in ("length", "a.b")),
        *(({"n": value}, "not a cost") for value in (-1, 0.5, "many", [[[1]]])),
    ],
)
def test_what_is_no_cost_ends_the_measuring(texts: Path, value: Any, message: str) -> None:
    class Wrong(Costs):
        def sample_costs(self, encoded: dict[str, Any]) -> Any:
            return value

    with pytest.raises(FatalSampleError, match=message):
        run(texts, Wrong())


def test_a_column_is_of_one_kind() -> None:
    with pytest.raises(FatalSampleError, match="is a number for some samples, and a list of rows of 1 for others"):
        columns_of([{"n": 1}, {"n": [1]}], "here")
    with pytest.raises(FatalSampleError, match=r"rows of 1 .* and a list of rows of 2"):
        columns_of([{"n": [[1, 2]]}, {"n": [1]}], "here")
    columns = columns_of([{"n": 1, "m": []}, None, {"m": [[1, 2]]}], "here")
    numbers, lists = columns["n"], columns["m"]
    assert isinstance(numbers, np.ndarray) and numbers.tolist() == [1, 0, 0]
    assert isinstance(lists, Ragged) and lists.counts.tolist() == [0, 0, 1] and lists.values.tolist() == [[1, 2]]


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.slow
@pytest.mark.parametrize("texts", [30], indirect=True)
def test_killed_at_any_step_it_goes_on(texts: Path) -> None:
    folder = texts / ".nv-meta/energon_lite.columns"
    for _ in killed_at_every_step(lambda: run(texts, Costs()), lambda: shutil.rmtree(folder, ignore_errors=True)):
        run(texts, Costs())
        check(texts, 30)


ROW = st.lists(st.integers(0, 9), max_size=4)


@given(st.lists(ROW, min_size=1, max_size=12), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_values_that_are_cut_and_put_in_place_are_the_same(rows: list[list[int]], data: st.DataObject) -> None:
    from energon_lite.loading.measuring_runner import Values

    def made(some: list[list[int]]) -> Values:
        columns = columns_of([{"n": sum(row), "m": row} for row in some], "here")
        return Values(np.array([len(row) % 3 for row in some], dtype=np.uint8), columns)

    start = data.draw(st.integers(0, len(rows) - 1))
    stop = data.draw(st.integers(start + 1, len(rows)))
    known = data.draw(st.lists(ROW, min_size=len(rows), max_size=len(rows)))
    before = made(known) if any(known) else Values.zeros(len(rows))
    found = before.replaced([(start, made(rows[start:stop]))])
    expected = made([*known[:start], *rows[start:stop], *known[stop:]])
    assert found.flags.tolist() == expected.flags.tolist()
    assert np.array_equal(found.column("n", 0), expected.column("n", 0))
    pairs = zip(found.column("m", 1), expected.column("m", 1), strict=True)
    assert all(one.tolist() == other.tolist() for one, other in pairs)
