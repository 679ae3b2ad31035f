"""Decoders that guests add by a table, and what is left without the extra `media`."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import Any

import pytest

from energon_lite import entry_points
from energon_lite.entry_points import Decoder
from energon_lite.errors import DecodeError, UsageError
from energon_lite.storage import PartDecoder, RangeStream, SampleDecoder
from energon_lite.storage.read.ranges import StreamedParts
from energon_lite.storage.samples import part_decoder
from energon_lite.storage.samples.part_decoder import DecoderSettings


class Reversed(PartDecoder):
    streams = True

    def __call__(self, part_name: str, data: bytes, /) -> bytes:
        if not data:
            raise ValueError("no bytes")
        return data[::-1]

    def of_stream(self, stream: RangeStream, /) -> bytes:
        stream.seek(0)
        return stream.read()[::-1]

    def check(self, part_name: str, where: str) -> None:
        raise UsageError(f"{part_name} needs a mirror", where=where)


def decoder(settings: DecoderSettings) -> Reversed | None:
    return None if settings.max_unpacked_bytes == 1 else Reversed()


def forget() -> None:
    for function in (part_decoder._entries, part_decoder.decoder_for, part_decoder.made_decoder):
        function.cache_clear()


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Decoder]]:
    """The decoders of guests, instead of those that are installed."""
    made: dict[str, Any] = {}
    merged = entry_points._merged
    monkeypatch.setattr(entry_points, "_merged", lambda name: made if name == "DECODERS" else merged(name))
    forget()
    yield made
    forget()


def test_a_decoder_of_a_guest(table: dict[str, Decoder]) -> None:
    table["reversed"] = Decoder(f"{__name__}:decoder", ("rev", "json"))
    decode = SampleDecoder().decode
    assert decode("a.rev", b"abc") == decode("REV", b"abc") == decode("rev.gz", gzip.compress(b"abc")) == b"cba"
    assert decode("json", b"[1]") == [1]  # the core decodes it
    assert SampleDecoder(handlers={"rev": len}).decode("rev", b"abc") == 3
    assert SampleDecoder(max_unpacked_bytes=1).function("rev") is None
    function = SampleDecoder().function("rev")
    assert function is not None and function(b"abc") == b"cba"
    with pytest.raises(DecodeError, match=r"part 'a\.rev' \(0 bytes\).*no bytes"):
        decode("a.rev", b"")


def test_what_is_streamed_and_checked(table: dict[str, Decoder]) -> None:
    table["reversed"] = Decoder(f"{__name__}:decoder", ("rev",))
    parts = ("a.rev", "txt", "REV")
    assert SampleDecoder(stream_above=7).streamed(parts) == StreamedParts(frozenset(["a.rev", "REV"]), 7)
    assert SampleDecoder(stream_above=None).streamed(parts) is None
    assert SampleDecoder(handlers={"rev": len}).streamed(["a.rev"]) is None
    with pytest.raises(UsageError, match=r"rev\.gz needs a mirror") as error:
        SampleDecoder().check_parts(["rev.gz"], "here")
    assert error.value.where == "here"
    SampleDecoder(handlers={"rev": len}).check_parts(["rev.gz"], "here")


@pytest.mark.usefixtures("table")
def test_without_the_extra_media() -> None:
    sound = b"RIFF" + bytes(4) + b"WAVEfmt "
    decoder = SampleDecoder()
    assert decoder.decode("mp4", b"film") == b"film" and decoder.function("mp4") is None
    assert decoder.streamed(["mp4"]) is None
    decoder.check_parts(["mp4"], "here")
    assert SampleDecoder(guess_content=True).decode("bin", sound) == sound
    assert SampleDecoder(av_decode=None).decode("wav", sound) == sound
    with pytest.raises(UsageError, match="av_decode 'torch' needs the extra `media`"):
        SampleDecoder(av_decode="torch")
