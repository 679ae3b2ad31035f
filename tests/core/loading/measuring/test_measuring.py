"""Measuring a whole data set: what is found, what is kept, what is done again."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite import SkipSample, TaskEncoder
from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.errors import DatasetError, FatalSampleError, UsageError, WorkerError
from energon_lite.loading import measuring
from energon_lite.loading.leaves import open_whole
from energon_lite.loading.makers.sample_length import SampleLength
from energon_lite.loading.measured_columns import Maker, MeasureReport
from energon_lite.loading.measuring import measure
from energon_lite.loading.measuring_runner import MeasuringRunner
from energon_lite.storage.index.column_file import ColumnFile, column_path
from energon_lite.storage.index.columns import write_column
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.sharded_job import Ranks
from tests.accidents import killed_at_every_step
from tests.testing import write_dataset

MAKER = Maker({"by": "test"})


class Encoder(TaskEncoder):
    """Texts are numbers, which are the lengths; those that end with 3 are skipped, -1 fails."""

    seconds = 0.0
    seen: list[int] = []

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        time.sleep(self.seconds)
        number = int(sample.text)
        self.seen.append(number)
        if number < 0:
            raise ValueError(f"{number} is no length")
        if number % 10 == 3:
            raise SkipSample("ends with 3")
        return {"tokens": range(number) if number > 10**6 else [0] * number}


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    Encoder.seen, Encoder.seconds = [], 0.0


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Shards of 300, 5 and 256 samples with texts 0, 1, 2, ... of which 100 fails."""
    texts = iter(range(561))
    shards = {
        f"{shard}.tar": [(f"{shard}{n}", {"txt": str(-1 if n == 100 else next(texts)).encode()}) for n in range(count)]
        for shard, count in (("a", 300), ("b", 5), ("c", 100))
    }
    return write_dataset(tmp_path / "d", shards)


def version(path: Path | str) -> tuple[int, int]:
    """What changes if a file is written."""
    stat = os.stat(path)
    return stat.st_ino, stat.st_mtime_ns


def run(data: Path, encoder: TaskEncoder | None = None, maker: Maker = MAKER, **options: Any) -> MeasureReport:
    encoder = encoder or Encoder()
    leaf = open_whole(LeafSpec(str(data), ""), encoder, False)
    options.setdefault("workers", 0)
    return measure(MeasuringRunner(leaf, encoder, SampleLength(encoder)), maker, **options)


def texts_of(data: Path) -> np.ndarray:
    source = WebdatasetSource.open(data)
    return np.array([int(SampleReader(source).sample(number).parts["txt"]) for number in range(len(source))])


def check(data: Path, name: str = "") -> None:
    """The columns are what the texts say."""
    source, texts = WebdatasetSource.open(data), texts_of(data)
    flags = np.where(texts < 0, 2, np.where(texts % 10 == 3, 1, 0))
    assert np.asarray(source.column(f"{name}skip")).tolist() == flags.tolist()
    assert np.asarray(source.column(f"{name}length")).tolist() == np.where(flags, 0, texts).tolist()


def columns(data: Path) -> dict[str, bytes]:
    folder = data / ".nv-meta/energon_lite.columns"
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("workers", [0, 2])
def test_lengths_skips_and_failures(data: Path, workers: int) -> None:
    ticks: list[tuple[int, int]] = []
    WebdatasetSource.open(data)
    index = version(data / ".nv-meta/energon_lite.idx")
    report = run(data, workers=workers, progress=lambda done, total, note: ticks.append((done, total)))
    assert version(data / ".nv-meta/energon_lite.idx") == index  # it stays as it is
    check(data)
    texts = texts_of(data)
    kept = texts[(texts >= 0) & (texts % 10 != 3)]
    assert (report.shards, report.samples, report.known) == (3, 405, 0) and ticks[-1] == (405, 405)
    assert (report.kept, report.skipped, report.failed) == (len(kept), int((texts % 10 == 3).sum()), 1)
    assert (report.shortest, report.longest, report.total) == (kept.min(), kept.max(), kept.sum())
    assert report.reasons == (
        (report.skipped, "encode_sample", "ends with 3", True),
        (1, "encode_sample", "ValueError: -1 is no length", False),
    )
    assert report.failures == ("a.tar, a100: encode_sample: ValueError: -1 is no length",)
    assert sorted(columns(data)) == ["length.col", "skip.col"]
    column = WebdatasetSource.open(data).column("length")
    assert column.dtype == np.int32 and column.maker == {"by": "test"}


class OfTheEpoch(TaskEncoder):
    """Lengths that depend on the epoch."""

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        _, _, index, epoch = sample.__restore_key__[:4]
        return {"tokens": [0] * (index + 1 + 1000 * epoch)}


@pytest.mark.parametrize("workers", [0, 2])
def test_lengths_are_those_of_epoch_0(data: Path, workers: int) -> None:
    run(data, OfTheEpoch(), workers=workers)
    assert list(WebdatasetSource.open(data).column("length")) == list(range(1, 406))


def test_long_lengths(data: Path) -> None:
    class Long(TaskEncoder):
        def sample_length(self, encoded: Any) -> int:
            return 2**31 if encoded.text == "7" else 1

    run(data, Long())
    column = WebdatasetSource.open(data).column("length")
    assert column.dtype == np.int64 and column[7] == 2**31 and column[8] == 1


class TestWhatIsKnown:
    def test_only_chunks_with_failures_are_measured_again(self, data: Path) -> None:
        run(data)
        files, Encoder.seen = columns(data), []
        report = run(data)
        assert len(Encoder.seen) == 256 and report.known == 405 - 256 and report.failed == 1
        check(data)
        assert columns(data) == files

    def test_nothing_is_written_if_all_is_known(self, data: Path) -> None:
        run(data, shards=["b.tar", "c.tar"])
        before, Encoder.seen = version(column_path(str(data / ".nv-meta/energon_lite.columns"), "length")), []
        report = run(data, shards=["b.tar"])
        assert not Encoder.seen and report.known == report.samples == 5
        assert version(report.written[1]) == before
        run(data, maker=Maker({"by": "test"}, "new", any_code=True), shards=["b.tar"])
        assert not Encoder.seen and ColumnFile.stored(str(data), "length")[0].code == "new"

    def test_other_settings_or_code(self, data: Path) -> None:
        maker = Maker({"by": "test"}, "code 1")
        run(data, maker=maker)
        for other, seen in (
            (Maker({"by": "another"}, "code 1"), 405),
            (Maker({"by": "another"}, "code 2"), 405),
            (Maker({"by": "another"}, "code 3", any_code=True), 256),
            (Maker({"by": "another"}, "code 3"), 256),  # now they count as made by this code
        ):
            Encoder.seen = []
            run(data, maker=other)
            assert len(Encoder.seen) == seen
        assert ColumnFile.stored(str(data), "length")[0].code == "code 3"

    def test_some_shards(self, data: Path) -> None:
        report = run(data, shards=["b.tar"])
        assert (report.shards, report.samples) == (1, 5)
        assert WebdatasetSource.open(data, shards=["b.tar"]).column("length")[3] == texts_of(data)[303]
        for shards in (None, ["b.tar", "a.tar"]):
            with pytest.raises(DatasetError, match=r"no values for \d of \d shards, such as 'a.tar'"):
                WebdatasetSource.open(data, shards=shards).column("length")
        Encoder.seen = []
        assert run(data, shards=["c.tar", "a.tar"]).known == 0 and len(Encoder.seen) == 400
        check(data)  # what was known of b.tar is kept

    def test_only_changed_and_new_shards(self, data: Path) -> None:
        run(data)
        Encoder.seen, old = [], (data / "c.tar").stat()
        texts = {"a": range(1000, 1300), "aa": range(5000, 5010), "b": range(300, 305), "c": texts_of(data)[305:]}
        shards = {
            f"{name}.tar": [(f"{name}{n}", {"txt": str(t).encode()}) for n, t in enumerate(values)]
            for name, values in texts.items()
        }
        write_dataset(data, shards)  # all of another time, but for one
        os.utime(data / "c.tar", ns=(old.st_atime_ns, old.st_mtime_ns))
        assert (data / "c.tar").stat().st_size == old.st_size
        with pytest.raises(DatasetError, match="older than the data set"):
            WebdatasetSource.open(data).column("length")
        report = run(data)
        assert report.known == 100 and len(Encoder.seen) == 315 and min(Encoder.seen) == 300
        check(data)

    def test_values_of_other_shards_that_do_not_fit_into_one_file(self, data: Path) -> None:
        encoder: Any = Encoder()
        encoder.sample_costs = lambda encoded: {"pieces": [[1]]}
        run(data, encoder, shards=["a.tar"])
        (data / ".nv-meta/energon_lite.columns/others.col").write_bytes(b"no column")  # passed over
        encoder.sample_costs = lambda encoded: {"pieces": [[1, 1]]}
        with pytest.raises(UsageError, match=r"'pieces' has other values for shards .* int32 \[1\]"):
            run(data, encoder, Maker({"by": "another"}), shards=["b.tar"])

    def test_two_names_stand_side_by_side(self, data: Path) -> None:
        run(data)
        run(data, maker=Maker({"by": "another"}), name="other")
        check(data)
        check(data, "other.")


def test_columns_that_would_stand_behind_others(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(data)
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "cache" in str(path) and access(path, mode))  # for root, too
    with pytest.raises(UsageError, match=r"'skip' already, made by something else[\s\S]*--name"):
        run(data, maker=Maker({"by": "another"}))
    run(data, maker=Maker({"by": "another"}), name="mine")
    check(data, "mine.")
    assert list((tmp_path / "cache").rglob("mine.length.col"))
    run(data)  # the same maker may
    check(data)


class TestTrouble:
    def test_too_many_failures_in_a_row(self, data: Path) -> None:
        class Broken(Encoder):
            failure_tolerance = 7

            def encode_sample(self, sample: Any) -> Any:
                encoded = super().encode_sample(sample)
                if int(sample.text) >= 250:  # over the end of the first chunk
                    raise KeyError("gone")
                return encoded

        with pytest.raises(FatalSampleError, match=r"7 samples in a row[\s\S]*KeyError"):
            run(data, Broken())
        Encoder.seen = []
        run(data)  # what failed is measured again, and of the rest what is not known
        check(data)

    def test_skips_in_a_row_are_no_trouble(self, data: Path) -> None:
        class Nothing(TaskEncoder):
            failure_tolerance = 5

            def encode_sample(self, sample: Any) -> Any:
                raise SkipSample("not today")

        report = run(data, Nothing())
        assert (report.skipped, report.kept, report.shortest) == (405, 0, 0)

    def test_a_sample_without_a_length_ends_it_at_once(self, data: Path) -> None:
        with pytest.raises(FatalSampleError, match=r"none of the fields tokens[\s\S]*it has text"):
            run(data, TaskEncoder(), workers=1)
        assert not (data / ".nv-meta/energon_lite.columns/length.col").exists()

    def test_a_worker_that_always_dies(self, data: Path) -> None:
        class Deadly(Encoder):
            def encode_sample(self, sample: Any) -> Any:
                if int(sample.text) == 290:
                    os._exit(3)
                return super().encode_sample(sample)

        with pytest.raises(WorkerError, match="3 workers died"):
            run(data, Deadly(), workers=1)
        run(data)
        assert len(Encoder.seen) == 405  # a.tar has a failed sample in its first chunk
        check(data)


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.nightly
def test_killed_at_every_step(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over columns of another measurement, which stay whole until the new ones are."""
    monkeypatch.setattr(measuring, "CHUNK", 16)
    run(data)
    expected = columns(data)
    folder = data / ".nv-meta/energon_lite.columns"
    names = [path.stem for path in folder.iterdir()]
    new = {name: list(WebdatasetSource.open(data).column(name)) for name in names}
    old = {name: [0] * len(values) for name, values in new.items()}

    def over_others() -> None:
        shutil.rmtree(folder)
        for name, values in old.items():
            write_column(data, name, np.array(values, np.int32))

    seen = set()
    for _ in killed_at_every_step(lambda: run(data), over_others):
        found = {name: list(WebdatasetSource.open(data).column(name)) for name in names}
        assert all(values in (old[name], new[name]) for name, values in found.items())
        seen.add(tuple(found[name] == new[name] for name in names))
        run(data)
        assert columns(data) == expected
    assert {(False, False), (True, True)} <= seen


class TestRanks:
    def test_equal_to_one_process(self, data: Path) -> None:
        alone = run(data)
        expected = columns(data)
        for path in (data / ".nv-meta/energon_lite.columns").iterdir():
            path.unlink()
        results: list[MeasureReport] = []
        first = threading.Thread(target=lambda: results.append(run(data, ranks=Ranks(0, 3, timeout=300))))
        first.start()
        time.sleep(0.2)
        assert first.is_alive()  # it waits for the others
        shares = [run(data, ranks=Ranks(rank, 3)) for rank in (2, 1)]
        first.join(300)
        assert [share.samples for share in shares] == [5, 44] and not shares[0].written
        assert results == [alone] and columns(data) == expected
