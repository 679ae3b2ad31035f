"""Columns beside the length: of an encoder, of parts, and of the headers of images, in one pass."""

from __future__ import annotations

import io
import json
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
from energon_lite.errors import DataIndexError, FatalSampleError, UsageError
from energon_lite.extras.balance.image_columns import ImageColumns, ImagePatches
from energon_lite.loading.leaves import open_whole
from energon_lite.loading.makers.sample_length import SampleLength
from energon_lite.loading.measured_columns import Maker, MeasureReport
from energon_lite.loading.measuring import measure
from energon_lite.loading.measuring_runner import MeasuringRunner, columns_of
from energon_lite.loading.part_columns import measure_parts
from energon_lite.storage.index.column_file import Ragged
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.testing import examples, killed_at_every_step

PATCHES = ImageColumns(ImagePatches(10))


def picture(height: int, width: int, kind: str) -> bytes:
    image = pytest.importorskip("PIL.Image")
    stream = io.BytesIO()
    image.new("RGB", (width, height)).save(stream, kind)
    return stream.getvalue()


@pytest.fixture
def images(write_dataset: Callable[..., Path], tmp_path: Path) -> Path:
    """Six samples in two shards, with 1, 2, 0, 1 (of a kind that only Pillow knows), 1 and 1 (damaged) images."""
    about = [json.dumps({"loss": n}).encode() for n in range(6)]
    shards = {
        "a.tar": [
            ("0", {"jpg": picture(30, 45, "JPEG"), "json": about[0]}),
            ("1", {"1.png": picture(20, 20, "PNG"), "2.webp": picture(10, 90, "WEBP"), "json": about[1]}),
            ("2", {"json": about[2]}),
        ],
        "b.tar": [
            ("3", {"jpg": picture(50, 10, "TIFF"), "json": about[3]}),
            ("4", {"jpg": picture(20, 30, "GIF"), "json": about[4]}),
            ("5", {"jpg": b"\xff\xd8\xff\xe0", "json": about[5]}),
        ],
    }
    return write_dataset(tmp_path / "images", shards)


def values_of(data: Path, name: str) -> list[int]:
    values: list[int] = np.asarray(WebdatasetSource.open(data).column(name)).tolist()
    return values


@pytest.mark.parametrize("workers", [0, 2])
def test_the_headers_of_images_in_one_pass_with_other_parts(images: Path, workers: int) -> None:
    columns = {"loss": "json.loss", "bytes": "*", "png": "1.png"}
    report = measure_parts(str(images), None, columns=columns, others=[PATCHES], workers=workers)
    assert values_of(images, "images") == [1, 2, 0, 1, 1, 0]
    assert values_of(images, "patches") == [3 * 4, 4 + 9, 0, 5, 6, 0]
    assert values_of(images, "squared_patches") == [144, 16 + 81, 0, 25, 36, 0]
    assert values_of(images, "loss") == [0, 1, 2, 3, 4, 5]
    sizes = [[part.stat().st_size for part in sorted(images.glob("*.tar"))], values_of(images, "bytes")]
    assert 0 < sum(sizes[1]) < sum(sizes[0])
    assert [n > 0 for n in values_of(images, "png")] == [False, True, False, False, False, False]
    counts, found = WebdatasetSource.open(images).ragged_column("image_sizes")[np.array([3, 1, 2, 0])]
    assert counts.tolist() == [1, 2, 0, 1]
    assert found.tolist() == [[50, 10], [20, 20], [10, 90], [30, 45]]
    assert WebdatasetSource.open(images).ragged_column("image_patches")[:].values.ravel().tolist() == [12, 4, 9, 5, 6]
    with pytest.raises(DataIndexError, match="no column 'length'"):
        values_of(images, "length")
    assert report.failed == 1 and "picture" in report.failures[0]
    assert report.columns["patches"] == (6, 36, 13)
    names = (
        "bytes.col image_patches.ragged image_sizes.ragged images.col loss.col patches.col png.col squared_patches.col"
    )
    assert sorted(Path(path).name for path in report.written) == names.split()


def test_ragged_columns_follow_a_choice_of_shards_and_samples(images: Path) -> None:
    measure_parts(str(images), None, others=[ImageColumns()], workers=0)
    whole = WebdatasetSource.open(images).ragged_column("image_sizes")
    source = WebdatasetSource.open(images, shards=["b.tar", "a.tar"], excluded_samples=[("a.tar", "0")])
    part = source.ragged_column("image_sizes")
    assert len(part) == 5 and part.width == 2
    assert part[:].counts.tolist() == [1, 1, 0, 2, 0]
    assert part[np.array([3])].values.tolist() == [[20, 20], [10, 90]]
    assert part.fingerprint != whole.fingerprint
    with pytest.raises(IndexError):
        part[np.array([5])]


def test_what_is_known_is_not_read_again(images: Path) -> None:
    first = measure_parts(str(images), "json", others=[PATCHES], workers=0)
    again = measure_parts(str(images), "json", others=[PATCHES], workers=0)
    assert (first.known, again.known) == (0, 6)
    more = measure_parts(str(images), "json", others=[ImageColumns(ImagePatches(5))], workers=0)
    assert more.known == 0
    assert values_of(images, "patches") == [6 * 9, 16 + 36, 0, 20, 24, 0]
    # What this maker makes no more does not stay; what others made does.
    measure_parts(str(images), None, columns={"own": "*"}, workers=0)
    names = {path.name for path in (images / ".nv-meta/energon_lite.columns").iterdir()}
    assert {"own.col", "patches.col", "length.col"} <= names


def test_columns_are_refused_that_would_stand_in_place_of_others(images: Path) -> None:
    with pytest.raises(UsageError, match="a column cannot have this name"):
        measure_parts(str(images), None, columns={"length": "json"})
    with pytest.raises(UsageError, match="a column cannot have this name"):
        measure_parts(str(images), None, columns={"patches": "json"}, others=[ImageColumns()])
    with pytest.raises(UsageError, match=r"--column one= jsn: no sample has such a part"):
        measure_parts(str(images), None, columns={"one": "jsn"})


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
    with pytest.raises(FatalSampleError, match="a list of rows of 1 of some samples and a number"):
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
    known = data.draw(st.just([[] for _ in rows]) | st.lists(ROW, min_size=len(rows), max_size=len(rows)))
    before = made(known) if any(known) else Values.zeros(len(rows))
    found = before.replaced([(start, made(rows[start:stop]))])
    expected = made([*known[:start], *rows[start:stop], *known[stop:]])
    assert found.flags.tolist() == expected.flags.tolist()
    assert np.array_equal(found.column("n", 0), expected.column("n", 0))
    pairs = zip(found.column("m", 1), expected.column("m", 1), strict=True)
    assert all(one.tolist() == other.tolist() for one, other in pairs)
