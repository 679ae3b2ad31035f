from __future__ import annotations

import pickle

import pytest

from energon_lite.errors import DecodeError, FieldAccessError, SampleError
from energon_lite.samples import CrudeSample, ImageClassificationSample, ImageSample, SourceInfo, TextSample
from energon_lite.storage.read.webdataset import RawSample
from energon_lite.storage.samples.field_map import SampleLoader, compile_field_map

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


def test_a_part_that_cannot_be_decoded() -> None:
    with pytest.raises(DecodeError, match=r"part 'json' .*JSONDecodeError[\s\S]*sample 'k' in /data/s/0.tar"):
        TEXT.load(raw(json=b"{"), ())


def test_a_broken_image() -> None:
    loader = SampleLoader(ImageSample, compile_field_map({"image": "png,jpg"}))
    with pytest.raises(DecodeError, match=r"part 'png' \(11 bytes\) .* not an image[\s\S]*sample 'k' in /data/s/0.tar"):
        loader.load(raw(png=b"\x89PNG broken"), ())


def test_a_field_that_is_not_there() -> None:
    with pytest.raises(
        FieldAccessError, match=r"field 'text': the sample has no part 'json'[\s\S]*'k' in /data/s/0.tar"
    ):
        TEXT.load(raw(txt=b""), ())


def test_a_type_without_a_map() -> None:
    with pytest.raises(SampleError, match="TextSample needs a field_map"):
        SampleLoader(TextSample).load(raw(), ())


def test_loaders_travel_to_workers() -> None:
    assert pickle.loads(pickle.dumps(TEXT)) == TEXT
