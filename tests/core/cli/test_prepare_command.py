from __future__ import annotations

import io
import json
import os
import resource
import shlex
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from energon_lite.cli import output as command_output
from energon_lite.cli import prepare as prepare_command
from energon_lite.storage.dataset_scan import ShardScans
from energon_lite.storage.index.column_file import ColumnFile
from energon_lite.storage.index.nv_meta import read_info
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.prepare_by_command import FIELDS, document, written
from tests.tables_by_hand import png
from tests.testing import output_of, refusal_of, write_tar

#: Without questions, one split.
PLAIN = ("--non-interactive", "--split-ratio", "1,0,0")


#: What it says when it is done, and when it refuses.
done, refused = partial(output_of, "prepare"), partial(refusal_of, "prepare")


def test_everything_by_options(data: Path) -> None:
    output = done(
        data,
        *("--non-interactive", "--split-ratio", "2,1,1", "--sample-type", "CaptioningSample"),
        *("--field-map", FIELDS, "--num-workers", "2", "--no-progress"),
    )
    assert "Found 4 shards with 8 samples" in output and "png (8), json (8), cls (8)" in output
    assert "Splits: train 4 samples in 2 shards; val 2 samples in 1 shard; test 2 samples in 1 shard" in output
    for name in (".info.json", "split.yaml", "dataset.yaml", "index.uuid", "index.sqlite", "energon_lite.idx"):
        assert name in output and (data / ".nv-meta" / name).exists()
    assert document(data)["field_map"] == json.loads(FIELDS)
    assert "Sample 1, key '001':" in output and '"text": "caption 1"' in output and "x" * 60 + "..." in output


@pytest.mark.parametrize("file", ["energon_lite.idx", "index.sqlite"])
def test_a_full_disk_is_named_with_the_fix(data: Path, file: str) -> None:
    options = (*PLAIN, "--sample-type", "CrudeWebdataset", "--no-progress")
    done(data, *options)
    (data / ".nv-meta" / ".info.json").unlink()
    size = (data / ".nv-meta" / file).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # a write that ends beyond the limit fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, hard))
        output = refused(data, *options, "--force-overwrite")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"where: {data}" in output and "fix:" in output, output
    assert ("--no-sqlite" in output) == (file == "index.sqlite")
    done(data, *options)  # with room again


def test_without_a_guest_nothing_is_asked(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_command, "storage_guests", dict)
    assert "--non-interactive needs --split-ratio" in refused(data)
    output = refused(data, "--split-ratio", "1,0,0", "--sample-type", "TextSample")
    assert "TextSample needs a field map" in output and "Sample 0" not in output


def test_splits_by_pattern(data: Path) -> None:
    options = ("--non-interactive", "--split-parts", "a:s[01]", "--split-parts", "b:s2", "--skip-dataset-yaml")
    assert "1 shard in no split, such as 's3.tar'" in done(data, *options)
    assert document(data, "split.yaml") == {"split_parts": {"a": ["s{0..1}.tar"], "b": ["s2.tar"]}, "exclude": []}


def test_crude_samples(data: Path) -> None:
    done(data, *PLAIN, "--sample-type", "CrudeWebdataset")
    assert document(data) == {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}


def test_without_a_sample_type_no_dataset_yaml(data: Path) -> None:
    output = done(data, *PLAIN)
    assert "There is no dataset.yaml yet" in output and "--force-overwrite" in output
    assert not (data / ".nv-meta/dataset.yaml").exists()


def test_another_name_of_dataset_yaml(data: Path) -> None:
    options = ["--non-interactive", "--split-ratio", "0,1,0", "--sample-type", "CrudeWebdataset"]
    output = done(data, *options, "--dataset-yaml-name", "crude.yaml", "--no-sqlite")
    assert "crude.yaml" in output and "dataset_config='crude.yaml'" in output and "split_part='val'" in output
    assert not (data / ".nv-meta/index.sqlite").exists()


def test_excluded_and_shuffled_shards(data: Path) -> None:
    done(data, "--non-interactive", "--split-ratio", "1,1,1", "--exclude", "s0", "--shuffle-tars")
    assert list(read_info(str(data))) == ["s1.tar", "s2.tar", "s3.tar"]
    split = document(data, "split.yaml")
    assert [split["split_parts"][name] for name in ("train", "val", "test")] != [["s1.tar"], ["s2.tar"], ["s3.tar"]]


def test_overwriting(data: Path) -> None:
    done(data, *PLAIN)
    output = refused(data, *PLAIN)
    assert "already been prepared" in output and "--force-overwrite" in output
    done(data, *PLAIN, "--force-overwrite", "--exclude", "s3")
    assert len(read_info(str(data))) == 3


def test_tar_index_only(data: Path) -> None:
    assert "has not been prepared" in refused(data, "--tar-index-only")
    done(data, *PLAIN)
    for path in (data / "s0.tar.idx", data / ".nv-meta/energon_lite.idx"):
        path.unlink()
    assert "Wrote 4 .tar.idx files" in done(data, "--tar-index-only")
    assert (data / "s0.tar.idx").exists() and len(WebdatasetSource.open(data)) == 8


def test_two_ranks(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "Rank 1 of 2: 4 samples in 2 shards; rank 0 goes on" in done(data, *PLAIN) and written(data) == set()
    assert "Found 4 shards with 8 samples" in done(data, *PLAIN, "--rank", "0") and len(read_info(str(data))) == 4


def test_a_rank_that_does_not_come(data: Path) -> None:
    ranks = ("--rank", "0", "--world-size", "2", "--rank-timeout", "0.1")
    assert "rank 1: s1.tar, s3.tar" in refused(data, *PLAIN, *ranks)


def test_ranks_ask_nothing(data: Path) -> None:
    output = refused(data, "--rank", "1", "--world-size", "2")
    assert "2 processes cannot ask questions" in output and "--non-interactive" in output
    assert "rank 2 of 2 does not exist" in refused(data, "--rank", "2", "--world-size", "2", *PLAIN)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (3_456_789, "3.457 MB"), (2 * 10**15, "2000 TB")],
)
def test_the_unit_suits_the_size(count: int, text: str) -> None:
    assert command_output.byte_size(count) == text


def test_progress_in_a_log(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_output, "_BETWEEN", 0.0)
    lines = [line for line in done(data, *PLAIN, "--num-workers", "1").splitlines() if line.startswith("Indexing")]
    assert len(lines) == 4 and lines[-1].startswith("Indexing: 4 of 4 shards, ")
    assert "GB/s" in lines[-1] and "about 0 s left" in lines[-1]
    assert "Indexing" not in done(data, *PLAIN, "--force-overwrite", "--rescan", "--no-progress")
    (data / "moved.tar").symlink_to("elsewhere.tar")
    assert "moved.tar" in (said := refused(data, *PLAIN, "--force-overwrite")) and "does not exist" in said


def test_progress_on_a_terminal(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with command_output.progress(True, "Indexing", "shards") as show:
        scans = ShardScans(str(data), [f"s{number}.tar" for number in range(4)], workers=1, progress=show)
        scans.do_share()
    shown = capsys.readouterr().err
    assert "Indexing: 100%" in shown and "4/4" in shown and "GB/s" in shown


def test_a_sample_loader_is_begun(data: Path) -> None:
    output = done(data, *PLAIN, "--sample-type", "TextSample")
    assert "sample_loader.py: complete it where it says TODO" in output
    assert document(data)["part_filter"] == "sample_loader.py:part_filter"
    assert (data / ".nv-meta/sample_loader.py").exists()
    assert "When sample_loader.py is complete" in output and "trust_code=True" in output.split("in Python")[1]


def test_the_fields_that_there_seem_to_be_are_proposed(data: Path) -> None:
    options = (*PLAIN, "--sample-type", "CaptioningSample")
    proposed = next(line for line in done(data, *options).splitlines() if "--field-map" in line)
    output = done(data, *options, *shlex.split(proposed))
    assert "Next, in Python" in output and "trust_code" not in output
    assert document(data)["field_map"] == {"image": "png", "caption": "json[text]"}


def test_json(data: Path) -> None:
    assert json.loads(done(data, *PLAIN, "--json", "--no-progress"))["splits"]["train"] == [4, 8]


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ([], ["--non-interactive needs --split-ratio"]),
        (["--split-ratio", "8;1;1"], ["'8;1;1' is not a ratio", '"8,1,1"']),
        (["--split-parts", "train"], ["'train' is not of the form name:regex"]),
        (["--split-parts", "train:x.*"], ["'x.*'", "matches none of the 4 shards", "'s0.tar'"]),
        (["--split-ratio", "1,0,0", "--split-parts", "a:."], ["--split-parts cannot be combined"]),
    ],
)
def test_wrong_options(data: Path, options: list[str], messages: list[str]) -> None:
    output = refused(data, "--non-interactive", *options)
    assert all(message in output for message in messages) and written(data) == set()


@pytest.mark.parametrize(
    ("field_map", "message"),
    [
        ("image=png", "--field-map is not JSON"),
        ("[1]", "--field-map is not a JSON object"),
        ('{"image": 1}', "not a JSON object of strings"),
        ('{"image": "png", "caption": "json[txt]"}', "did you mean 'text'"),
    ],
)
def test_wrong_field_maps(data: Path, field_map: str, message: str) -> None:
    options = (*PLAIN, "--sample-type", "CaptioningSample", "--field-map", field_map)
    assert message in refused(data, *options) and written(data) == set()


def test_broken_shards(data: Path) -> None:
    os.truncate(data / "s1.tar", 3000)
    (data / "s2.tar").write_bytes(b"")
    output = refused(data, *PLAIN)
    assert "2 of 4 shards cannot be indexed" in output
    assert "s1.tar: the tar file is truncated" in output and "s2.tar: the shard is an empty file" in output


def test_broken_shards_are_left_out_if_that_is_wanted(data: Path) -> None:
    os.truncate(data / "s1.tar", 3000)
    assert "s1.tar: left out: the tar file is truncated" in done(data, *PLAIN, "--skip-broken-shards")
    assert list(read_info(str(data))) == ["s0.tar", "s2.tar", "s3.tar"]


def test_a_folder_that_cannot_be_written(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, **_: object) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "makedirs", refuse)
    output = refused(data, *PLAIN)
    assert "Permission denied: " in output and ".nv-meta" in output


def test_columns_beside_the_length(data: Path) -> None:
    columns = ("--length-field", "json", "--column", "all=*", "--patches", "1")
    assert "column all:" in done(data, *PLAIN, *columns)
    source = WebdatasetSource.open(data)
    assert (source.column("all")[:] >= source.column("length")[:]).all()
    assert source.column("patches")[:].tolist() == [4] * 8
    (file,) = ColumnFile.stored(str(data), "all")
    assert shlex.split(file.command) == ["energon-lite", "prepare", str(data), "--tar-index-only", *columns]


def array(*shape: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(shape, np.float32))
    return file.getvalue()


CAPTIONS = ["--sample-type", "CaptioningSample", "--field-map", '{"image": "png", "caption": "txt"}']
CRUDE = ["--sample-type", "CrudeWebdataset"]
#: What a newcomer may have: the parts of sample n, and what the data set is prepared with.
DATA = {
    "equal pictures": (lambda n: {"png": png(4, 4), "txt": b"t"}, CAPTIONS),
    "unequal pictures": (lambda n: {"png": png(4 + n, 19 - n), "txt": b"t"}, CAPTIONS),
    "grey and colour": (lambda n: {"png": png(4, 4, mode=("RGB", "L")[n % 2]), "txt": b"t"}, CAPTIONS),
    "text": (lambda n: {"txt": b"word " * n}, ["--sample-type", "TextSample", "--field-map", '{"text": "txt"}']),
    "arrays": (lambda n: {"npy": array(n + 1)}, ["--sample-type", "ImageSample", "--field-map", '{"image": "npy"}']),
    "answers": (
        lambda n: {"jpg": png(3 + n, 5), "json": json.dumps({"q": "?", "a": ["x"] * n}).encode()},
        ["--sample-type", "VQASample", "--field-map", '{"image": "jpg", "context": "json[q]", "answers": "json[a]"}'],
    ),
    "raw parts": (lambda n: {"png": png(4 + n, 5), "json": b'{"n": 1}'}, CRUDE),
    "raw parts, some of them missing": (lambda n: {"txt": b"t", **({"cls": b"1"} if n % 2 else {})}, CRUDE),
    "raw dictionaries of several keys": (lambda n: {"json": json.dumps({f"key{n}": n}).encode()}, CRUDE),
}


@pytest.mark.parametrize("kind", DATA)
def test_the_printed_next_step_runs(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts, options = DATA[kind]
    for shard in range(2):
        write_tar(tmp_path / f"s{shard}.tar", [(f"{n}", parts(n)) for n in range(4 * shard, 4 * shard + 4)])
    output = done(tmp_path, *PLAIN, "--num-workers", "1", *options)
    lines = output.partition("Next, in Python:\n")[2].partition("\nDone")[0].strip("\n").splitlines()
    exec("\n".join(line[2:] for line in lines), {})
    printed = capsys.readouterr().out
    assert "__key__" in printed and ("caption=['t'" in printed) == (options is CAPTIONS)
    assert len(lines) == 6 or kind != "equal pictures"
