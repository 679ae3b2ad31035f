"""Streams over a stretch of a file, and what is fetched for a clip."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import av
import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import DatasetError, MissingShardError, UsageError
from energon_lite.extras.media import AVDecoder
from energon_lite.storage import open_stream
from energon_lite.storage.read import ranges
from energon_lite.storage.read.ranges import RangeStream
from tests.media_files import long_film
from tests.servers import Ranges, web_server
from tests.testing import examples


@settings(max_examples=examples(60))
@given(data=st.data())
def test_it_reads_as_the_file_does(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "numbers.bin"
    whole = bytes(range(256)) * 3
    path.write_bytes(whole)
    first = data.draw(st.integers(0, len(whole)))
    size = data.draw(st.integers(0, len(whole) - first))
    stream, plain = open_stream(path, offset=first, size=size), io.BytesIO(whole[first : first + size])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "_LEAST", data.draw(st.sampled_from([1, 7, 100])))
        patch.setattr(ranges, "_LARGEST", 50)
        patch.setattr(ranges, "_BEHIND", 5)
        patch.setattr(ranges, "_KEPT", data.draw(st.sampled_from([0, 64, 1 << 20])))
        for _ in range(data.draw(st.integers(1, 12))):
            if data.draw(st.booleans()):
                place = data.draw(st.integers(0, size + 3)), os.SEEK_SET
                assert stream.seek(*place) == plain.seek(*place)
            if data.draw(st.booleans()):
                start = data.draw(st.integers(0, size))
                stream.fetch_ahead(start, data.draw(st.one_of(st.none(), st.integers(start, size + 9))))
            length, found = data.draw(st.integers(-1, 200)), b""
            wanted = plain.read(length)
            while len(found) < len(wanted):
                found += stream.read(length if length < 0 else length - len(found))
            assert found == wanted
            assert stream.tell() == plain.tell()
    again = pickle.loads(pickle.dumps(stream))
    assert again.readall() == plain.getvalue() and len(pickle.dumps(stream)) < 500
    again.seek(-min(3, size), os.SEEK_END)
    assert again.read() == plain.getvalue()[-3:]


class Noted(Ranges):
    """Appends start and size of each range to ``sent``."""

    protocol_version = "HTTP/1.1"  # the file system reads from others, after some tries
    sent: list[tuple[int, int]] = []

    def do_GET(self) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.sent.append((first, min(last + 1, os.path.getsize(self.translate_path(self.path))) - first))
        super().do_GET()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """URL of a file, and the file, which a test writes."""
    monkeypatch.setattr(Noted, "sent", [])
    with web_server(partial(Noted, directory=str(tmp_path))) as url:
        yield f"{url}/film", tmp_path / "film"


def groups(data: bytes, start: float, stop: float) -> tuple[int, int]:
    """Bytes from the first picture that a clip needs to the first one after it that needs no other; and the place
    behind all pictures."""
    with av.open(io.BytesIO(data)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    keys = [(float(one.pts * one.time_base), one.pos) for one in packets if one.is_keyframe]
    end = max(one.pos + one.size for one in packets)
    after = min([pos for time, pos in keys if time > stop], default=end)
    return after - max(pos for time, pos in keys if time <= start), end


@pytest.mark.parametrize("kind", ["mp4", "mkv"])
def test_a_clip_of_a_long_film_costs_its_groups_of_pictures(served: tuple[str, Path], kind: str) -> None:
    (url, path), data, sent = served, long_film(kind), Noted.sent
    path.write_bytes(data)
    for start in (0, 300, 417.3, 597.9):
        stream = open_stream(url)
        decode = AVDecoder(stream)
        assert decode.has_video_stream()
        header, begin = sum(size for _, size in sent), len(sent)
        assert header < 200_000 < len(data) // 50
        clips, ((first, last),) = decode.get_video_clips([(start, start + 2)])
        assert len(clips[0]) in (4, 5) and first <= start < last
        assert clips[0].equal(AVDecoder(io.BytesIO(data)).get_video_clips([(start, start + 2)])[0][0])
        # Where the file has its index at the end (Matroska), it is read when a place is first looked for.
        wanted, end = groups(data, start, start + 2)
        assert sum(size for place, size in sent[begin:] if place < end) <= 1.2 * wanted
        assert len(sent) < 15 and stream.fetched == sum(size for _, size in sent) and stream.requests == len(sent)
        # What was fetched is not fetched again.
        before = len(sent)
        decode.get_video_clips([(start, start + 2)])
        assert len(sent) == before
        sent.clear()


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(MissingShardError, match="does not exist"):
        open_stream(tmp_path / "none.mp4")
    fsspec.filesystem("memory").pipe_file("/films/a.mp4", b"0123456789")
    try:
        assert open_stream("memory://films/a.mp4", offset=3, size=4).read() == b"3456"
        with pytest.raises(UsageError, match="no 8 bytes at 3 in a file of 10"):
            open_stream("memory://films/a.mp4", offset=3, size=8)
        with pytest.raises(MissingShardError):
            open_stream("memory://films/b.mp4")
    finally:
        fsspec.filesystem("memory").rm("/films", recursive=True)
    path = tmp_path / "short.bin"
    path.write_bytes(b"0123456789")
    stream = open_stream(path)
    path.write_bytes(b"012")
    with pytest.raises(DatasetError, match="ends 7 bytes before byte 10"):
        stream.read()
    assert isinstance(stream, RangeStream) and "short.bin" in repr(stream)
