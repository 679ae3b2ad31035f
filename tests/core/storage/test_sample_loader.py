"""From parts to samples: field maps, functions that a data set brings along, decoders that guests add by a table."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from energon_lite import basic_sample_keys, entry_points
from energon_lite.entry_points import Decoder
from energon_lite.errors import ConfigError, DecodeError, FieldAccessError, SampleError, UsageError
from energon_lite.samples import CrudeSample, ImageClassificationSample, SourceInfo, TextSample
from energon_lite.storage import PartDecoder, SampleDecoder
from energon_lite.storage.read.ranges import StreamedParts
from energon_lite.storage.read.webdataset import RawSample
from energon_lite.storage.samples import part_decoder
from energon_lite.storage.samples.field_map import SampleLoader, compile_field_map
from energon_lite.storage.samples.part_decoder import DecoderSettings
from energon_lite.trust import load_function

SOURCE = SourceInfo(dataset_path="/data", index=3, shard_name="s/0.tar", file_names=("k.txt", "k.json"))


def raw(**parts: bytes) -> RawSample:
    return RawSample("k", parts, SOURCE)


TEXT = SampleLoader(TextSample, compile_field_map({"text": "json[t]"}), subflavors={"source": "web"})


def test_a_typed_sample() -> None:
    sample = TEXT.load(raw(json=b'{"t": "hello"}'), ("sample", 0, 3))
    assert isinstance(sample, TextSample) and sample.text == "hello"
    assert (sample.__key__, sample.__restore_key__) == ("k", ("sample", 0, 3))
    assert (sample.__subflavors__, sample.__sources__) == ({"source": "web"}, (SOURCE,))
    assert TEXT.parts == {"json"}


def test_every_sample_has_subflavors_of_its_own() -> None:
    first, second = (TEXT.load(raw(json=b'{"t": ""}'), ()) for _ in range(2))
    assert first.__subflavors__ is not None
    first.__subflavors__["changed"] = True
    assert second.__subflavors__ == {"source": "web"} == TEXT.subflavors
    nested = replace(TEXT, subflavors={"tags": ["a"]})
    nested.load(raw(json=b'{"t": ""}'), ()).__subflavors__["tags"].append("b")
    assert nested.load(raw(json=b'{"t": ""}'), ()).__subflavors__ == {"tags": ["a"]}


def test_a_crude_sample() -> None:
    loader = SampleLoader(part_filter=frozenset({"txt", "json"}))
    sample = loader.load(raw(txt=b"a", json=b"[1]"), ("sample",))
    assert isinstance(sample, CrudeSample) and loader.parts == {"txt", "json"}
    assert sample == {
        "txt": "a",
        "json": [1],
        "__key__": "k",
        "__shard__": "s/0.tar",
        "__restore_key__": ("sample",),
        "__subflavors__": {},
        "__sources__": (SOURCE,),
    }
    assert SampleLoader().parts is None
    other = replace(SOURCE, index=7)
    base = {name: sample[name] for name in ("__key__", "__restore_key__", "__subflavors__", "__sources__")}
    assert basic_sample_keys(sample) == base
    assert basic_sample_keys(sample, (other,)) == base | {"__sources__": (SOURCE, other)}
    assert basic_sample_keys(CrudeSample(__key__="k"), (other,))["__sources__"] == (other,)


def test_raw_bytes() -> None:
    sample = SampleLoader(TextSample, compile_field_map({"text": "txt"}), decoder=None).load(raw(txt=b"a"), ())
    assert isinstance(sample, TextSample) and sample.text == b"a"


def test_the_users_own_function() -> None:
    def own(parts: dict[str, object]) -> dict[str, object]:
        return {"image": None, "label": parts["cls"], "__key__": f"{parts['__key__']}-own", "__restore_key__": "mine"}

    loader = SampleLoader(ImageClassificationSample, part_filter=frozenset({"cls"}), sample_loader=own)
    sample = loader.load(raw(cls=b"4"), ("sample", 1))
    assert isinstance(sample, ImageClassificationSample)
    assert (sample.label, sample.__key__, sample.__restore_key__) == (4, "k-own", ("sample", 1))


def test_what_fails_names_the_sample() -> None:
    with pytest.raises(DecodeError, match=r"part 'json' .*JSONDecodeError[\s\S]*sample 'k' in /data/s/0.tar"):
        TEXT.load(raw(json=b"{"), ())
    missing = r"field 'text': the sample has no part 'json'[\s\S]*'k' in /data/s/0.tar"
    with pytest.raises(FieldAccessError, match=missing):
        TEXT.load(raw(txt=b""), ())
    with pytest.raises(SampleError, match="TextSample needs a field_map"):
        SampleLoader(TextSample).load(raw(), ())


def test_loaders_travel_to_workers() -> None:
    assert pickle.loads(pickle.dumps(TEXT)) == TEXT


# -- functions that a data set brings along


def test_functions_of_a_file_and_those_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def load(sample):\n    return sample + 1\n\ndef other(sample):\n    return 0\n")
    assert load_function(str(tmp_path), "own.py", "load")(1) == 2
    assert load_function(str(tmp_path), "own.py:other", "load")(1) == 0
    (tmp_path / "bare.py").write_text("number = 3\n")
    for name, words in (
        ("gone.py", "there is no 'gone.py'"),
        ("bare.py:gone", "there is no function 'gone'"),
        ("bare.py:number", "there is no function 'number'"),
        ("bare.py", "there is no function 'load'"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_function(str(tmp_path), name, "load")


# -- field maps


SAMPLE = {"jpg": "image", "json": {"text": ["a", "b"], "n": {"7": "seven"}}, "seg.png": "mask", "mp": {"k": 1}}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("jpg", "image"),
        ("seg.png", "mask"),
        ("json[text]", ["a", "b"]),
        ("json[text][1]", "b"),
        ("json[text][-2]", "a"),
        ("json[n][7]", "seven"),
        ("png,jpg", "image"),
        ("jpg, png", "image"),
        ("json[title],json[text][5],json[text][0]", "a"),
        ("jpg[0],mp[k]", 1),
    ],
)
def test_access(expression: str, expected: object) -> None:
    assert compile_field_map({"field": expression}).apply(SAMPLE) == {"field": expected}


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("jgp", r"field 'f': the sample has no part 'jgp'[\s\S]*did you mean 'jpg'\? it has: 'jpg', 'json', 'seg.png'"),
        ("png,webp", r"no part 'webp' \(nor is there png\)"),
        ("json[txet]", r"json has no key 'txet'[\s\S]*did you mean 'text'"),
        ("json[text][2]", r"json\[text\] has 2 elements, there is no \[2\]"),
        ("json[text][one]", r"'one' must be a number"),
        ("jpg[0]", r"jpg is of type str, so \[0\] cannot be taken"),
    ],
)  # fmt: skip
def test_what_is_not_there(expression: str, message: str) -> None:
    with pytest.raises(FieldAccessError, match=message):
        compile_field_map({"f": expression}).apply(SAMPLE)


@pytest.mark.parametrize(
    "expression", ["", ",", "jpg,", "json[", "json[]", "json]x", "[a]", "json[a]b", "a[b", 3, None]
)
def test_what_cannot_be_parsed(expression: object) -> None:
    with pytest.raises(ConfigError, match=r"not a field access[\s\S]*field_map\.image") as caught:
        compile_field_map({"image": expression})  # type: ignore[dict-item]
    assert repr(expression) in str(caught.value)


def test_parts_are_those_of_all_alternatives() -> None:
    field_map = compile_field_map({"image": "jpg,png", "caption": "json[text][0]", "boxes": "json[boxes]"})
    assert field_map.parts == {"jpg", "png", "json"}
    assert pickle.loads(pickle.dumps(field_map)) == field_map


# -- decoders of guests, and what is left without the extra `media`


class Reversed(PartDecoder):
    streams = True

    def __call__(self, part_name: str, data: bytes, /) -> bytes:
        if not data:
            raise ValueError("no bytes")
        return data[::-1]

    def check(self, part_name: str, where: str) -> None:
        raise UsageError(f"{part_name} needs a mirror", where=where)


def decoder(settings: DecoderSettings) -> Reversed | None:
    return None if settings.max_unpacked_bytes == 1 else Reversed()


def forget() -> None:
    for function in (part_decoder.decoder_entry, part_decoder.decoder_for, part_decoder.made_decoder):
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
    table["other"] = Decoder("other_package:decoder", (".rev", "json"))
    forget()
    with pytest.raises(UsageError, match=rf"'rev' have several decoders: {__name__}:decoder, other_package:decoder"):
        SampleDecoder().check_parts(["a.rev"], "here")
    assert SampleDecoder(handlers={"rev": len}).decode("rev", b"abc") == 3 and decode("json", b"[1]") == [1]


def test_what_is_streamed_and_checked(table: dict[str, Decoder]) -> None:
    table["reversed"] = Decoder(f"{__name__}:decoder", ("rev",))
    parts = ("a.rev", "txt", "REV")
    assert SampleDecoder(stream_above=7).streamed(parts) == StreamedParts(frozenset(["a.rev", "REV"]), 7)
    assert SampleDecoder(stream_above=None).streamed(parts) is None
    assert SampleDecoder(handlers={"rev": len}).streamed(["a.rev"]) is None
    with pytest.raises(UsageError, match=r"rev\.gz needs a mirror\n  where: here"):
        SampleDecoder().check_parts(["rev.gz"], "here")
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
