"""Lengths: of encoded samples, and of stored parts."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import TaskEncoder, TextSample
from energon_lite.errors import FatalSampleError, UsageError
from energon_lite.loading.makers.sample_length import SampleLength
from energon_lite.loading.part_columns import measure_parts
from energon_lite.storage.files.shard_store import Range, ShardStore
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.tables_by_hand import npy
from tests.testing import write_dataset


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Ten samples in two shards; the last one has but one part."""
    members: list[tuple[str, dict[str, bytes]]] = []
    for number in range(9):
        about = {"n": number, "tokens": list(range(number)), "deep": {"text": "ä" * number, "list": [{"n": 7}]}}
        parts = {
            "txt": b"x" * number * 3,
            "npy": npy(np.zeros((number + 1, 3000), dtype=np.int16)),
            "meta.json": json.dumps(about).encode(),
            "npz": npz(ids=np.zeros((number + 2, 3)), one=np.ones(())),
            "json.gz": gzip.compress(json.dumps([number]).encode()),
        }
        members.append((str(number), parts))
    write_dataset(tmp_path / "d", {"a.tar": members[:5], "b.tar": [*members[5:], ("9", {"cls": b"1"})]})
    return tmp_path / "d"


@pytest.mark.parametrize(
    ("field", "lengths"),
    [
        ("txt", [3 * n for n in range(9)]),
        ("npy", [n + 1 for n in range(9)]),
        ("npz.ids", [n + 2 for n in range(9)]),
        ("meta.json.n", list(range(9))),
        ("meta.json[tokens]", list(range(9))),
        ("meta.json.deep.text", list(range(9))),  # characters, not bytes
        ("meta.json.deep.list.0.n", [7] * 9),
        ("json.gz.0", list(range(9))),
    ],
)
def test_lengths(data: Path, field: str, lengths: list[int]) -> None:
    report = measure_parts(str(data), field, workers=0)
    column = WebdatasetSource.open(data).column("length")
    assert np.asarray(column).tolist() == [*lengths, 0] and column.dtype == np.int32
    assert (report.samples, report.kept, report.failed) == (10, 9, 1) and report.total == sum(lengths)
    assert report.reasons[0][0] == 1 and "there is no part" in report.reasons[0][2]


def test_workers_find_the_same(data: Path) -> None:
    files = []
    for workers in (0, 2):
        (path,) = measure_parts(str(data), "npy", workers=workers).written
        files.append(Path(path).read_bytes())
        os.unlink(path)
    assert files[0] == files[1]


def test_of_an_array_only_the_header_is_read(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    fetch = ShardStore.fetch

    def counting(self: ShardStore, ranges: list[Range]) -> list[bytes]:
        sizes.extend(size for (path, _), _, size in ranges if path.endswith(".tar"))  # not those of the index
        return fetch(self, ranges)

    monkeypatch.setattr(ShardStore, "fetch", counting)
    measure_parts(str(data), "npy", workers=0)
    assert len(sizes) == 9 and max(sizes) <= 4096
    sizes.clear()
    measure_parts(str(data), "txt")
    assert not sizes  # the index knows it


def test_what_cannot_be_read_counts_as_failed(data: Path) -> None:
    report = measure_parts(str(data), "meta.json.deep", workers=0)
    assert (report.kept, report.failed) == (0, 10)
    assert (9, "read", "SampleError: meta.json[deep] is a dict, which has no length", False) in report.reasons
    report = measure_parts(str(data), "npz.one", workers=0)
    assert (9, "read", "SampleError: npz[one] is a ndarray, which has no length", False) in report.reasons
    report = measure_parts(str(data), "meta.json.deep.nope", workers=0)
    assert (9, "read", "FieldAccessError: meta.json[deep] has no key 'nope'", False) in report.reasons
    rare = [*((f"{number:03}", {"cls": b"1"}) for number in range(150)), ("150", {"txt": b"1"})]
    write_dataset(data.parent / "rare", {"a.tar": rare})
    report = measure_parts(str(data.parent / "rare"), "txt", workers=0)
    assert (report.kept, report.failed) == (1, 150)  # no limit, since nothing is damaged


def test_a_sample_that_cannot_be_read_fails_once(data: Path) -> None:
    report = measure_parts(str(data), "txt", columns={"deep": "meta.json.deep"}, workers=0)
    no_length = (9, "read", "SampleError: meta.json[deep] is a dict, which has no length", False)
    assert report.failed == 10 and report.reasons == (
        no_length,
        (1, "read", "SampleError: there is no part 'txt'", False),
    )
    report = measure_parts(str(data), "meta.json.deep", columns={"deep": "meta.json.deep.x"}, workers=0)
    assert report.failed == 10 and report.reasons[0] == no_length and len(report.reasons) == 2


def test_no_such_part(data: Path) -> None:
    with pytest.raises(UsageError, match=r"--length-field txd: no sample has such a part[\s\S]*did you mean 'txt'"):
        measure_parts(str(data), "txd")
    with pytest.raises(UsageError, match=r"the parts are: cls, json.gz, meta.json, npy, npz, txt"):
        measure_parts(str(data), "..")


Pair = namedtuple("Pair", ["tokens", "other"])


@dataclass
class Data:
    input_ids: Any
    labels: Any = None


class Plain:
    def __init__(self, tokens: Any):
        self.tokens = tokens


class Own(TaskEncoder):
    def sample_length(self, encoded: Any) -> Any:
        return encoded["n"] + 1


@pytest.mark.parametrize(
    ("encoded", "length"),
    [
        ({"tokens": torch.zeros(7, 2)}, 7),
        ({"image": torch.zeros(3, 8, 8), "input_ids": np.zeros(5)}, 5),
        ({"text_tokens": b"abcd", "tokens": (1, 2)}, 2),  # tokens goes before text_tokens
        ({"token_ids": []}, 0),
        ({"tokens": 12}, 12),
        ({"tokens": torch.tensor(12)}, 12),
        ({"tokens": np.int32(12)}, 12),
        (Data([1, 2, 3]), 3),
        (Pair([1], None), 1),
        (Plain([1, 2]), 2),
        (torch.zeros(4, 9), 4),
        ([1, 2, 3], 3),
    ],
)
def test_without_a_name(encoded: Any, length: int) -> None:
    assert SampleLength(TaskEncoder())(encoded) == length


def test_a_named_field() -> None:
    sample = {"tokens": [1, 2], "labels": torch.zeros(9), "text": "äöü"}
    assert [SampleLength(TaskEncoder(), name)(sample) for name in ("tokens", "labels", "text")] == [2, 9, 3]
    assert SampleLength(Own(), "tokens")(sample) == 2  # what the user names goes before the method


def test_the_encoder_says_it() -> None:
    length = SampleLength(Own())
    assert length({"n": 4, "tokens": [1]}) == 5 and str(length) == "sample_length"
    with pytest.raises(FatalSampleError, match=r"Own.sample_length returned -1, which is not a length"):
        length({"n": -2})
    with pytest.raises(FatalSampleError, match=r"returned 1.5"):
        length({"n": 0.5})


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"tokens": 0.5}, r"'tokens' of an encoded sample has no length: float"),
        ({"tokens": torch.tensor(0.5)}, "has no length: Tensor of shape"),
        ({"tokens": np.float32(0.5)}, "has no length: float32 of shape"),
        ({"tokens": True}, "has no length: bool"),
        ("text", "it has no fields"),
    ],
)
def test_nothing_fits(sample: Any, words: str) -> None:
    with pytest.raises(FatalSampleError, match=words):
        SampleLength(TaskEncoder())(sample)


def test_fields_of_other_names() -> None:
    sample = TextSample(__key__="k", __restore_key__=(), text="abc")
    with pytest.raises(FatalSampleError) as caught:
        SampleLength(TaskEncoder())(sample)
    message = str(caught.value)
    assert "none of the fields tokens, input_ids, token_ids, text_tokens; it has text (str)" in message
    assert "--length-field" in message and "sample_length(self, encoded)" in message and "__key__" not in message
    with pytest.raises(FatalSampleError, match=r"no field 'txet'[\s\S]*did you mean 'text'"):
        SampleLength(TaskEncoder(), "txet")(sample)
