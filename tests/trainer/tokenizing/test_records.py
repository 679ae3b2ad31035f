"""Files cut into blocks: every record once, in order, wherever the cuts are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import DatasetError, UsageError
from energon_lite.trainer.tokenizing import records
from energon_lite.trainer.tokenizing.records import find_blocks, read_block


def _all(paths: list[Path], size: int, **settings: Any) -> list[Any]:
    blocks = find_blocks([str(path) for path in paths], records=size, **settings)
    return [record for block in blocks for record in read_block(block)]


texts = st.lists(st.text(st.characters(exclude_characters="\n\r", codec="utf-8"), max_size=5), max_size=12)


@given(texts, st.integers(1, 5), st.booleans(), st.sampled_from([1, 3, 1 << 24]))
def test_every_line_of_jsonl_is_a_record_of_one_block(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], size: int, ended: bool, chunk: int
) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "some.jsonl"
    text = "\n".join(json.dumps({"x": line}) if line else "" for line in lines)
    path.write_text(text + "\n" * ended, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_CHUNK", chunk)
        blocks = find_blocks([str(path)], records=size)
    found = [list(read_block(block)) for block in blocks]
    assert [(record.number, record.fields) for block in found for record in block] == [
        (number, {"x": line}) for number, line in enumerate(lines, start=1) if line
    ]
    assert all(len(block) <= size for block in found)


def test_lines_that_are_no_records_say_why(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(b'{"a": 1}\n[1]\n{"a": \n\n"x"\n')
    found = _all([path], 10)
    assert [record.number for record in found] == [1, 2, 3, 5]
    assert [record.problem.split(":")[0] for record in found] == [
        "",
        "not an object but a list",
        "not JSON",
        "not an object but a str",
    ]


def test_text_files_are_records_or_their_lines_are(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\r\n".encode())
    (tmp_path / "b.md").write_bytes(b"three")
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    paths = sorted(tmp_path.iterdir())
    whole = _all(paths, 2)
    assert [record.fields and record.fields["content"] for record in whole] == ["one\r\ntwo\r\n", "three", None]
    assert [record.file for record in whole] == [0, 1, 2]
    assert "not UTF-8" in whole[2].problem
    lines = _all(paths[:2], 1, text_records="line")
    assert [(record.file, record.number, record.fields["content"]) for record in lines] == [
        (0, 1, "\ufeffone".lstrip("\ufeff")),
        (0, 2, "two"),
        (1, 1, "three"),
    ]


@given(st.lists(st.integers(0, 4), max_size=5), st.integers(1, 6))
def test_parquet_files_are_cut_between_row_groups(
    tmp_path_factory: pytest.TempPathFactory, groups: list[int], size: int
) -> None:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    path = tmp_path_factory.mktemp("parquet") / "some.parquet"
    schema = pa.schema([("x", pa.int64())])
    rows = 0
    with ParquetWriter(path, schema) as writer:
        for count in groups:
            writer.write_table(pa.table({"x": list(range(rows, rows + count))}, schema), row_group_size=max(1, count))
            rows += count
    found = _all([path], size)
    assert [(record.number, record.fields) for record in found] == [(x + 1, {"x": x}) for x in range(rows)]


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"some.csv is not of a kind.*\n.*\*\.jsonl"):
        find_blocks([str(tmp_path / "some.csv")], records=1)
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(DatasetError, match="the Parquet file cannot be read"):
        find_blocks([str(tmp_path / "bad.parquet")], records=1)
    path = tmp_path / "short.jsonl"
    path.write_text('{"a": 1}\n' * 5)
    (block,) = find_blocks([str(path)], records=10)
    path.write_text('{"a": 1}\n')
    with pytest.raises(DatasetError, match="has become shorter"):
        list(read_block(block))
