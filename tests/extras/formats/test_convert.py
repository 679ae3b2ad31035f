"""Data sets in other formats: equal samples, on any number of processes, killed and run again."""

from __future__ import annotations

import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from energon_lite.errors import DatasetError, UsageError
from energon_lite.extras.formats import convert_command, shard_writers
from energon_lite.extras.formats.convert_command import DONE_FILE, ConvertReport, convert_dataset
from energon_lite.extras.formats.convert_samples import as_file, as_json
from energon_lite.storage.sharded_job import Ranks
from tests.accidents import interrupted
from tests.tables_by_hand import png
from tests.testing import CRUDE_YAML, contents_of, examples, json_lines, output_of, same, val_loader, write_dataset

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
SAMPLES = 30


def array(values: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.asarray(values))
    return stream.getvalue()


def parts_of(number: int) -> dict[str, bytes]:
    return {
        "png": png(2, 2, (number, 0, 0)),
        "txt": f"té {number}".encode(),
        "json": json.dumps({"n": [number], "none": None}).encode(),
        "cls": b"%d" % number,
        "tokens.npy": array(np.arange(number % 4 + 1, dtype=np.uint16)),
        "grid.npy": array(np.ones((2, number % 3 + 1), dtype=np.float32)),
        "bin": bytes([number, 0, 255]),
    }


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shards = {f"s{k}.tar": [(f"{k}/{n}", parts_of(k * 10 + n)) for n in range(10)] for k in range(3)}
    return write_dataset(tmp_path_factory.mktemp("tars") / "data", shards, dataset_yaml=CRUDE_YAML)


def samples(path: Any) -> list[dict[str, Any]]:
    with val_loader(path, split_part="train") as loader:
        return [{name: value for name, value in dict(one).items() if not name.startswith("__")} for one in loader]


def convert(source: Path, target: Path, to: str, **options: Any) -> ConvertReport:
    return convert_dataset(str(source), str(target), to, **{"workers": 1, **options})


def with_types(rows: list[dict[str, Any]]) -> list[Any]:
    return [rows, [{name: type(value) for name, value in row.items()} for row in rows]]


@pytest.mark.parametrize("to", ["mds", "parquet", "tar"])
def test_there_and_back(tmp_path: Path, tars: Path, to: str) -> None:
    report = convert(tars, tmp_path / "there", to, samples_per_shard=7)
    assert (report.samples, report.shards, report.made) == (SAMPLES, 5, 5)
    assert not (tmp_path / "there" / convert_command.WORK_FOLDER).exists()
    expected = with_types(samples(tars))
    assert same(with_types(samples(tmp_path / "there")), expected)
    convert(tmp_path / "there", tmp_path / "back", "tar")
    assert same(with_types(samples(tmp_path / "back")), expected)


def test_what_others_find_in_parquet(tmp_path: Path, tars: Path) -> None:
    convert(tars, tmp_path / "new", "parquet")
    row = pq.read_table(tmp_path / "new" / "shard-00000.parquet").to_pylist()[3]
    assert row["txt"] == "té 3" and json.loads(row["json"])["n"] == [3] and row["tokens.npy"] == [0, 1, 2, 3]
    assert row["cls"] == 3 and isinstance(row["png"], bytes)


def test_streaming_reads_what_was_made(tmp_path: Path, tars: Path) -> None:
    streaming = pytest.importorskip("streaming")
    convert(tars, tmp_path / "new", "mds", samples_per_shard=7)
    found = streaming.StreamingDataset(local=str(tmp_path / "new"), shuffle=False, batch_size=1)
    assert len(found) == SAMPLES
    one = found[13]
    assert one["txt"] == "té 13" and one["json"] == {"n": [13], "none": None} and one["cls"] == 13
    assert one["tokens.npy"].tolist() == [0, 1] and one["png"].size == (2, 2) and one["grid.npy"].shape == (2, 2)


def test_jsonl(tmp_path: Path, tars: Path) -> None:
    with pytest.raises(UsageError, match="part 'png' is bytes") as error:
        convert(tars, tmp_path / "x.jsonl", "jsonl")
    assert "--without png" in str(error.value.fix)
    file = tmp_path / "lines.jsonl"
    for _ in range(2):
        file.unlink(missing_ok=True)  # one that was removed is made again
        report = convert(tars, file, "jsonl", without=("png", "bin"), samples_per_shard=7)
    assert report.samples == SAMPLES and [path.name for path in tmp_path.glob("lines*")].count("lines.jsonl") == 1
    lines = json_lines(file)
    assert [line["cls"] for line in lines] == list(range(SAMPLES)) and lines[5]["tokens.npy"] == [0, 1]
    assert samples(file)[7]["json"] == lines[7]
    assert Path(convert(file, tmp_path / "odd.jsonl", "parquet").path, "shard-00000.parquet").exists()
    convert(file, tmp_path / "table", "parquet", split="train")
    again = tmp_path / "again.jsonl"
    convert(tmp_path / "table", again, "jsonl")
    assert json_lines(again) == lines


SCALARS = {
    "text": st.text(max_size=5).filter(lambda text: text.isprintable()),
    "whole": st.integers(-(2**62), 2**62),
    "real": st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.booleans(),
    "bytes": st.binary(max_size=5),
    "tokens": st.lists(st.integers(0, 9), min_size=1, max_size=4).map(lambda tokens: np.array(tokens, np.int32)),
}


@settings(max_examples=examples(12))
@given(st.data(), st.lists(st.sampled_from(list(SCALARS)), min_size=1, unique=True), st.sampled_from(["mds", "jsonl"]))
def test_any_table(tmp_path_factory: pytest.TempPathFactory, data: Any, names: list[str], to: str) -> None:
    folder = tmp_path_factory.mktemp("table")
    rows = data.draw(st.integers(1, 6))
    names = [name for name in names if name != "bytes" or to != "jsonl"] or ["text"]
    columns = {name: data.draw(st.lists(SCALARS[name], min_size=rows, max_size=rows)) for name in names}
    table = pa.table(columns)
    pq.write_table(table, folder / "a.parquet")
    convert(folder / "a.parquet", folder / "new", to, samples_per_shard=4)
    if to == "mds":
        assert same(*(with_types(samples(folder / name)) for name in ("new", "a.parquet")))
        return
    files = sorted((folder / "new").glob("*.jsonl"))
    assert [json.loads(line) for file in files for line in file.read_text().split("\n")[:-1]] == table.to_pylist()


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers(-(2**70), 2**70)
    | st.floats(-9, 9)
    | st.text("aé\ud800", max_size=2)
)
VALUES = LEAVES | st.lists(LEAVES, max_size=2) | st.dictionaries(st.sampled_from("ab"), LEAVES, max_size=2)


@settings(max_examples=examples(60))
@given(VALUES, VALUES, st.sampled_from(["mds", "parquet", "tar", "jsonl"]))
@example({"a": 1}, {"a": 1, "b": 2}, "parquet")
@example([{"a": 1}], [{"a": 1}, {"b": 2}], "parquet")
@example(0.5, float("nan"), "parquet")
def test_values_unlike_the_first_come_back_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, first: Any, other: Any, to: str
) -> None:
    folder = tmp_path_factory.mktemp("unlike")
    given = folder / "in.jsonl"
    given.write_text("".join(json.dumps({"x": value, "y": 1}) + "\n" for value in (first, first, other)))
    try:
        convert(given, folder / "new", to, look=2)
    except (UsageError, DatasetError):
        return
    made = next((folder / "new").glob("*.jsonl")) if to == "jsonl" else folder / "new"
    expected = [without_none(one["json"]) for one in samples(given)]
    rows = [one.get("json", {name[:1]: value for name, value in one.items()}) for one in samples(made)]
    assert [without_none(row) for row in rows] == expected


def without_none(value: Any) -> Any:
    """Without the entries of dicts that are None: a table has a place for each."""
    if isinstance(value, dict):
        return {name: without_none(one) for name, one in value.items() if one is not None}
    if isinstance(value, (list, tuple)) or hasattr(value, "tolist"):
        return [without_none(one) for one in value]
    return "not a number" if value != value else value


def test_images_of_hugging_face_become_files(tmp_path: Path) -> None:
    images = [{"bytes": parts_of(n)["png"], "path": path} for n, path in enumerate(("a.png", None))]
    pq.write_table(pa.table({"image": images, "label": [3, 4], "note": [None, "x"]}), tmp_path / "a.parquet")
    convert(tmp_path / "a.parquet", tmp_path / "tar", "tar")
    first, second = samples(tmp_path / "tar")
    assert first.keys() == {"image.png", "label.json"} and second["note.txt"] == "x" and second["label.json"] == 4
    assert tuple(first["image.png"].shape) == (3, 2, 2)
    convert(tmp_path / "a.parquet", tmp_path / "mds", "mds", without=("note",))
    third, fourth = samples(tmp_path / "mds")
    assert third.keys() == fourth.keys() == {"image.png", "label"} and fourth["label"] == 4
    assert (third["image.png"] == first["image.png"]).all()


FILES = {
    b"RIFF\4\0\0\0WEBP": "file.webp",
    b"RIFF\4\0\0\0WAVE": "file.wav",
    b"RIFF\4\0\0\0ACON": "file",
    b"\xff\xd8\xff\xe0": "file.jpg",
    b"GIF89a": "file.gif",
    b"words": "file",
    b"fLaC": "file",
}


@pytest.mark.parametrize(("data", "name"), FILES.items())
def test_files_without_a_path_get_the_extension_of_their_first_bytes(data: bytes, name: str) -> None:
    assert as_file("file", {"bytes": data, "path": None}, "there") == (name, data)


def test_values_that_only_some_formats_have() -> None:
    name, data = as_file("image", Image.new("L", (3, 2)), "there")
    assert name == "image.png" and Image.open(io.BytesIO(data)).size == (3, 2)
    assert as_json("x", [Decimal("1.50"), np.int8(3)], "there") == ["1.50", 3]
    with pytest.raises(UsageError, match="'x' is a set"):
        as_json("x", {1}, "there")
    file, rows = io.BytesIO(), [("a", {"image": Image.new("L", (3, 2))})]
    assert shard_writers.Mds(rows, "there").write(file, rows) == 1 and file.getvalue().endswith(data)


def test_killed_and_run_again(tmp_path: Path, tars: Path) -> None:
    target, options = tmp_path / "new", {"samples_per_shard": 7}
    whole = tmp_path / "whole"
    convert(tars, whole, "mds", **options)

    killed = partial(interrupted, convert_command._Shards, "do", lambda _, unit: unit == 3)
    with killed(), pytest.raises(KeyboardInterrupt):
        convert(tars, target, "mds", **options)
    assert not (target / "index.json").exists()
    with pytest.raises(UsageError, match="begun with other settings"):
        convert(tars, target, "mds", samples_per_shard=8)
    assert convert(tars, target, "mds", **options).made == 2
    assert contents_of(whole) == contents_of(target)
    assert convert(tars, target, "mds", **options).made == 0
    report = convert(tars, target, "mds", samples_per_shard=15, force_overwrite=True)
    assert report.shards == 2 and len(list(target.glob("*.mds"))) == 2
    with killed(), pytest.raises(KeyboardInterrupt):
        convert(tars, target, "mds", force_overwrite=True, **options)
    assert not (target / DONE_FILE).exists() and len(list(target.glob("*.mds"))) == 3


def test_several_ranks(tmp_path: Path, tars: Path) -> None:
    def one(rank: int) -> ConvertReport:
        return convert(tars, tmp_path / "new", "parquet", samples_per_shard=7, ranks=Ranks(rank, 2, 60))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, range(2))
    assert first.samples == SAMPLES and second.made in (2, 3)
    assert same(*(with_types(samples(path)) for path in (tmp_path / "new", tars)))


def test_groups_of_rows_end_by_the_bytes_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_writers, "_GROUP_BYTES", 100)
    rows = [(f"{number}", {"image": {"bytes": bytes(60)}}) for number in range(5)]
    file = io.BytesIO()
    assert shard_writers.ParquetRows(rows, "").write(file, rows) == 5
    assert [pq.ParquetFile(file).metadata.row_group(group).num_rows for group in range(3)] == [2, 2, 1]


def test_what_cannot_be_written(tmp_path: Path, tars: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").touch()
    for options in ({}, {"force_overwrite": True}):
        with pytest.raises(UsageError, match="the target exists already"):
            convert(tars, tmp_path / "mine", "mds", **options)
    uneven = {"s.tar": [("a", {"txt": b"x"}), ("b", {"txt": b"y", "cls": b"1"})]}
    path = write_dataset(tmp_path / "uneven", uneven, dataset_yaml=CRUDE_YAML)
    for to in ("mds", "parquet"):
        with pytest.raises((UsageError, DatasetError), match="sample 'b' differs from the first samples"):
            convert(path, tmp_path / to, to, look=1)
    arrays = {"s.tar": [(key, {"n.npy": array(np.ones(2, key))}) for key in ("u2", "i4")]}
    with pytest.raises((UsageError, DatasetError), match="arrays of several types"):
        other = write_dataset(tmp_path / "arrays", arrays, dataset_yaml=CRUDE_YAML)
        convert(other, tmp_path / "other", "parquet", look=1)
    convert(path, tmp_path / "good", "parquet")
    assert samples(tmp_path / "good") == [{"txt": "x", "cls": None}, {"txt": "y", "cls": 1}]
    convert(path, tmp_path / "tar", "tar")
    assert samples(tmp_path / "tar") == [{"txt": "x"}, {"txt": "y", "cls": 1}]
    with pytest.raises(UsageError, match="zip"):
        convert(path, tmp_path / "zip", "zip")
    (tmp_path / "blend.yaml").touch()
    with pytest.raises(UsageError, match="a blend is converted data set by data set"):
        convert(tmp_path / "blend.yaml", tmp_path / "b", "tar")


@pytest.mark.slow
def test_the_command_on_several_processes(tmp_path: Path, tars: Path) -> None:
    arguments = f"convert {tars} {tmp_path}/new --to mds --samples-per-shard 4 --no-progress".split()
    said = output_of(*arguments, "--num-workers", "2", "--without", "png")
    assert f"{SAMPLES} samples in 8 shards, " in said and " kB: " in said
    assert "png" not in samples(tmp_path / "new")[0] and (tmp_path / "new" / DONE_FILE).exists()
    assert "8 shards of them there already" in output_of(*arguments, "--without", "png")
    assert "streaming" not in sys.modules
