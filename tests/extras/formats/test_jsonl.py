"""Lines of a file as samples: where they are, as Energon counts them, and what happens when the file changes."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import astuple
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import EmptyDatasetError, NotPreparedError, ShardChangedError, counted
from energon_lite.extras.formats import jsonl_index
from energon_lite.extras.formats.jsonl_index import scan_jsonl
from energon_lite.storage.index.index_cache import index_places
from energon_lite.storage.prepare import prepare_jsonl
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.accidents import killed_at_every_step

objects = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=40), max_size=3)
spaces = st.text("\r \t", max_size=3)


@st.composite
def files(draw: st.DrawFn, odd: bool = False) -> tuple[bytes, list[bytes]]:
    """A file, and the lines that are samples."""
    texts = objects.map(lambda value: json.dumps(value, ensure_ascii=False).encode())
    if odd:
        texts |= st.sampled_from([b"{", b"}", b"[1]", b"{]", b"null", b"\xff\x00", b"{broken"])
    lines = draw(st.lists(st.none() | texts, max_size=12))
    content = b""
    for line in lines:
        content += draw(spaces).encode() + (line or b"") + draw(spaces).encode() + b"\n"
    ends = draw(st.booleans())
    return content if ends else content[:-1], [line for line in lines if line is not None]


@pytest.fixture(params=[1, 7, 1 << 20])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl_index, "_CHUNK", request.param)


@given(files(odd=True))
def test_lines(chunk: None, tmp_path: Path, file: tuple[bytes, list[bytes]]) -> None:
    content, lines = file
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    scan = scan_jsonl(str(path))
    assert [content[offset : offset + size] for offset, size, _ in scan.parts.tolist()] == lines
    assert scan.all_keys() == [str(number) for number in range(len(lines))]
    texts = [line.strip() for line in content.split(b"\n")]
    odd = [n for n, text in enumerate(texts, 1) if text and (text[:1], text[-1:]) != (b"{", b"}")]
    told = f"{counted(len(odd), 'line')} without a JSON object, such as line {odd[0] if odd else 0}"
    assert scan.notes == (told,) * bool(odd)


@given(files())
def test_the_index_is_the_one_that_energon_writes(tmp_path: Path, file: tuple[bytes, list[bytes]]) -> None:
    from megatron.energon.flavors.jsonl.jsonl_prepare import JsonlPreparator

    content, lines = file
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    if not lines:
        return  # which Energon refuses
    assert len(prepare_jsonl(path)) == len(lines)
    ours = (tmp_path / "x.jsonl.idx").read_bytes()
    assert JsonlPreparator.prepare_dataset(path) == len(lines)
    assert (tmp_path / "x.jsonl.idx").read_bytes() == ours


def test_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": 2}')
    reader = SampleReader(WebdatasetSource.open(tmp_path / "x.jsonl"))
    assert [reader.sample(number).parts["json"] for number in range(2)] == [b'{"a": 1}', b'{"a": 2}']
    assert not scan_jsonl(str(tmp_path / "x.jsonl")).notes


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "data" / "chats.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(30)))
    return path


def texts_of(path: Path) -> list[str]:
    source = WebdatasetSource.open(path)
    return [json.loads(SampleReader(source).sample(number).parts["json"])["text"] for number in range(len(source))]


def test_opened_as_it_is(chats: Path) -> None:
    assert texts_of(chats) == [f"text {number}" for number in range(30)]
    sample = SampleReader(WebdatasetSource.open(chats)).sample(7)
    assert sample.key == "7" and astuple(sample.source) == (str(chats), 7, "chats.jsonl", ("7.json",))
    assert sorted(os.listdir(chats.parent)) == ["chats.jsonl", "chats.jsonl.energon_lite.idx"]


def test_the_index_is_made_once_and_again_when_the_file_changes(chats: Path) -> None:
    index = chats.with_name("chats.jsonl.energon_lite.idx")
    texts_of(chats)
    made = index.stat().st_ino
    texts_of(chats)
    assert index.stat().st_ino == made
    with chats.open("a") as file:
        file.write('{"text": "one more"}\n')
    assert texts_of(chats)[-1] == "one more" and len(texts_of(chats)) == 31
    same_size = chats.read_bytes().replace(b'{"text": "text 1"}\n', b'\n{"text":"text 1"}\n')
    chats.write_bytes(same_size)
    os.utime(chats, (1, 1))
    assert texts_of(chats)[1] == "text 1"
    assert texts_of(Path(shutil.copy(chats, chats.with_name("other.jsonl")))) == texts_of(chats)


def test_a_file_that_changes_while_it_is_in_use(chats: Path) -> None:
    source = WebdatasetSource.open(chats)
    chats.write_text('{"text": "short"}\n')
    with pytest.raises(ShardChangedError, match="changed since it was indexed"):
        SampleReader(source).sample(29)


def test_a_folder_that_cannot_be_written(chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, cached = index_places(str(chats))
    refuse = os.open

    def open_(path: str, flags: int, *arguments: int, **options: int) -> int:
        if flags & os.O_CREAT and str(path).startswith(str(chats.parent)):
            raise PermissionError(13, "Permission denied", path)
        return refuse(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", open_)
    assert len(texts_of(chats)) == 30
    assert os.path.exists(cached) and not os.path.exists(beside)


@pytest.mark.usefixtures("quick_disk")
def test_killed_at_every_step(chats: Path) -> None:
    expected = texts_of(chats)

    def clean() -> None:
        for path in chats.parent.iterdir():
            if path != chats:
                path.unlink()

    for _ in killed_at_every_step(lambda: prepare_jsonl(chats), clean):
        assert texts_of(chats) == expected


def test_nothing_there(chats: Path) -> None:
    with pytest.raises(NotPreparedError, match="no such JSONL file"):
        WebdatasetSource.open(chats.parent / "no/others.jsonl")
    assert not (chats.parent / "no").exists()
    chats.write_text("\n \n")
    with pytest.raises(EmptyDatasetError, match="no samples in the data set"):
        WebdatasetSource.open(chats, split_part="train")
