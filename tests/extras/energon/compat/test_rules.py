"""Rules, against Energon's own: what a part becomes, over all extensions and image forms; which members make a sample;
and a sample in words."""

from __future__ import annotations

import dataclasses
import gzip
import io
import itertools
import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import megatron.energon.errors as their_errors
import megatron.energon.typed_converter as their_parser
import msgpack
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from megatron.energon import SampleDecoder as EnergonDecoder
from megatron.energon.flavors.webdataset.config import skip_meta_re, split_name_re
from megatron.energon.sample_utils import default_get_batch_keys as their_batch_keys
from megatron.energon.sample_utils import format_sample_detailed as their_text
from PIL import Image

from energon_lite.errors import ConfigError, UsageError
from energon_lite.extras.energon.compat import hooks
from energon_lite.extras.energon.compat.documents import JsonParser, to_json_object
from energon_lite.extras.energon.compat.hooks import format_sample_compact, format_sample_detailed
from energon_lite.extras.energon.compat.loaders import SystemRng, WorkerRng
from energon_lite.extras.energon.epath import EPath
from energon_lite.storage.samples.decoding import IMAGE_FORMS, SampleDecoder
from energon_lite.storage.tar_scan import split_member_name
from tests.testing import ALONE


def image(mode: str, kind: str) -> bytes:
    pixels = np.random.default_rng(5).integers(0, 256, (4, 3, len(mode)), dtype=np.uint8)
    return saved(Image.fromarray(pixels[..., 0] if mode == "L" else pixels, mode).save, kind)


def saved(save: Callable[..., Any], *arguments: Any, **arrays: Any) -> bytes:
    buffer = io.BytesIO()
    save(buffer, *arguments, **arrays)
    return buffer.getvalue()


@pytest.mark.parametrize("form", IMAGE_FORMS)
@pytest.mark.parametrize("file", ["L png", "RGB png", "RGBA png", "RGB jpeg", "RGB bmp"])
def test_images(tools: Any, form: str, file: str) -> None:
    mode, kind = file.split()
    data = image(mode, kind)
    ours = SampleDecoder(image_decode=form).decode(kind, data)
    theirs = EnergonDecoder(image_decode=form).decode(f"key.{kind}", data)
    if form.startswith("pil"):
        assert (ours.mode, ours.size, ours.tobytes()) == (theirs.mode, theirs.size, theirs.tobytes())
    else:
        assert tools.equal(ours, theirs)


PNG = image("RGB", "png")
ARRAY = np.array([[1.5, -2.0]], dtype=np.float16)
PARTS = {
    **dict.fromkeys(("png", "PNG", "a.b.Png"), PNG),
    **dict.fromkeys(("transcript", "TXT", ""), b"x"),
    **dict.fromkeys(("a.json", "JSON"), b"[]"),
    "txt": "grün\n".encode(),
    "text": b"",
    "json": json.dumps({"a": [1, 2.5, None, "ü"]}).encode(),
    "jsn": b"1",
    "jsonl": b"{}\n{}",
    "cls": b"3\n",
    "cls2": b"-1",
    "index": b"7",
    "inx": b"0",
    "id": b"12",
    "mp": msgpack.packb({"a": b"x", "b": [1]}),
    "msg": msgpack.packb([1, "x"]),
    "npy": saved(np.save, ARRAY),
    "npz": saved(np.savez, a=ARRAY, b=ARRAY[0]),
    "txt.gz": gzip.compress(b"packed"),
    "png.gz": gzip.compress(PNG),
    "gz": gzip.compress(b"packed"),
    "bin": b"\x00",
}


@pytest.mark.parametrize("part", PARTS)
def test_parts(tools: Any, part: str) -> None:
    data = PARTS[part]
    theirs = EnergonDecoder()({"__key__": "key", part: data})[part]
    assert tools.equal(SampleDecoder().decode(part, data), theirs)


# -- which members make a sample: our string arithmetic against Energon's regular expressions -------------------------


names = st.lists(st.sampled_from(["a", "b", ".", "/", "_", "__", "é", " "]), min_size=1, max_size=10).map("".join)


@given(names)
@example("__/a.b")
@example("____/a.b")
@example("./.x")
@example("a/./.x.y")
@example("a//.x")
def test_grouping(name: str) -> None:
    match = None if skip_meta_re.match(name) else split_name_re.match(name)
    assert split_member_name(name) == (match.groups() if match else None)


# -- a sample in words is what Energon makes of it --------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    n: int
    nested: dict


@pytest.mark.parametrize("indent", ["", "  "])
@pytest.mark.parametrize(
    "sample",
    [
        {"i": -3, "f": 2.5, "b": False, "n": None, "text": "hi", "lines": "a\nb", "many": (1, 2, "x")},
        {"list": [{"k": 1}, {"k": 2}], "pair": Pair(9, {"a": 1}), "bytes": b"abc", "type": object},
        {"t": torch.arange(20.0), "few": torch.tensor([0.0, 2.0]), "none": torch.zeros(0), "matrix": torch.ones(2, 2)},
        {"a": np.array([1, 2, 3]), "long": np.arange(9), "none": np.zeros(0), "words": np.array(["a"])},
        {"text": "x" * 2000, "list": list(range(30)), **{str(number): number for number in range(40)}},
        {"texts": ["x" * 1000, "x" * 1001], "lists": [[*range(10)], [*range(11)]], "bytes": [b"x" * 197, b"x" * 198]},
        {
            "maps": [dict.fromkeys(map(str, range(size))) for size in (25, 26)],
            "arrays": [np.arange(6), torch.arange(7)],
        },
        "text",
        5,
    ],
)
def test_equal_text(sample, indent):
    assert format_sample_detailed(sample, indent) == their_text(sample, indent)


def test_in_one_line() -> None:
    for sample, text in (
        (["abcd", "abcde", 1], "['abcd', 'abcd...']"),
        ((b"abcde", None), "(b'abcd...', None)"),
        ({"a": {"b": {"c": 1}}, 2: [[[]]], "more": 3}, "{a: {b: {...}}, 2: [[...]]}"),
        ((Pair(1, {}), Size(2)), "(Pair(n=1, nested={...}), Size(width=2, height=7))"),
        ([torch.zeros(2, 3), {}], "[Tensor(shape=(2, 3), dtype=torch.float32), {}]"),
        ((10**79, 10**80), f"({10**79}, 1000...)"),
        ([Pair, SimpleNamespace(shape=1)], f"[{Pair!r}, namespace(shape=1)]"),
    ):
        assert format_sample_compact(sample, depth=2, max_items=2, max_str_len=4) == text


def test_keys_of_a_batch() -> None:
    for name, keys in itertools.product(("__key__", "__keys__", "keys", "other"), (["a", "b"], ["a", 1])):
        for batch in ({name: keys}, SimpleNamespace(**{name: keys}), [{name: keys}, {}]):
            assert hooks.default_get_batch_keys(batch) == their_batch_keys(batch)
        assert hooks.default_get_batch_keys([]) is hooks.default_get_batch_keys({name: 5}) is None


# -- plain data as typed objects, checked -----------------------------------------------------------------------------


class Size(NamedTuple):
    width: int
    height: int = 7


@dataclasses.dataclass
class Leaf:
    name: str
    weight: float = 1.0
    size: Size | None = None
    tags: list[str] = dataclasses.field(default_factory=list)
    made: int = dataclasses.field(default=0, init=False)


NESTED = {"name": "a", "weight": 2, "size": {"width": 3}, "tags": ["x"]}
GOOD: list[tuple[Any, Any]] = [
    (True, int),
    (1, float),
    (None, None),
    (None, Any),
    ("a", Literal["a", "b"]),
    ({"a": [1]}, dict[str, list[int]]),
    ([1, 2], set[int]),
    ([], list[int]),
    ([1, 2, 3], tuple[int, ...]),
    ({"a": 1}, dict),
    ({"width": 4}, Size),
    ([{"width": 4, "height": 5}], list[Size]),
    ("/tmp/x", EPath),
]
BAD: list[tuple[Any, Any, str]] = [
    ("1", int, "root"),
    (1.5, int, "root"),
    ("c", Literal["a", "b"], "root"),
    ({"a": [1, "2"]}, dict[str, list[int]], "root.a.1"),
    ([1, 1], set[int], "root"),
    ([1], tuple[int, int], "root"),
    ("x", list[int], "root"),
    ("x", Size, "root"),
    ({}, Size, "needs 'width'"),
    ({"width": 1, "depth": 2}, Size, "has no 'depth'"),
    ({**NESTED, "size": {"width": "wide"}}, Leaf, "root.size.width"),
    ({**NESTED, "made": 3}, Leaf, "has no 'made'"),
]


@pytest.mark.parametrize(("data", "kind"), GOOD)
def test_it_makes_what_energon_makes(data: Any, kind: Any) -> None:
    made = JsonParser().raw_to_typed(data, kind)
    if kind is not EPath:
        assert made == their_parser.JsonParser().raw_to_typed(data, type(None) if kind is None else kind)
    else:
        assert made == EPath(data)


def test_records_inside_of_each_other() -> None:
    assert JsonParser().raw_to_typed(NESTED, Leaf) == Leaf("a", 2, Size(3, 7), ["x"])
    assert JsonParser().raw_to_typed([1, "a"], tuple[int, str]) == (1, "a")
    assert JsonParser(strict=False).raw_to_typed({"width": 1, "depth": 2}, Size) == Size(1)


@pytest.mark.parametrize(("data", "kind", "match"), BAD)
def test_what_is_not_of_its_type(data: Any, kind: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        JsonParser().raw_to_typed(data, kind)
    if kind is not Leaf:  # 7.4.1 does not read annotations that are text
        with pytest.raises(their_parser.JsonValueError):
            their_parser.JsonParser().raw_to_typed(data, kind)


def test_nothing_is_imported() -> None:
    names = {"__module__": "no_such_module", "__class__": "Evil"}
    assert JsonParser().raw_to_typed(names, Any) == names
    with pytest.raises(ConfigError, match="names code: no_such_module"):
        JsonParser().raw_to_typed([names], list[Any], allow_imports=True)


def test_a_call() -> None:
    def weigh(leaf: Leaf, times: int = 2) -> float:
        return leaf.weight * times

    parser = JsonParser()
    assert parser.safe_call_function({"leaf": NESTED}, weigh) == 4 == parser.safe_call_function([NESTED, 2], weigh)
    wrong: list[Any] = [{}, {"leaf": NESTED, "more": 1}, [NESTED, 2, 3], {"leaf": NESTED, "times": "x"}]
    for arguments in wrong:
        with pytest.raises(ConfigError):
            parser.safe_call_function(arguments, weigh)


def test_back_to_plain_data() -> None:
    assert to_json_object({"a": {1}, "b": Leaf("x"), "c": Size(1), "d": (1, None)}) == {
        "a": [1],
        "d": [1, None],
        "b": {"name": "x", "weight": 1.0, "size": None, "tags": []},
        "c": {"width": 1, "height": 7},
    }
    assert to_json_object([Leaf, weight_of]) == [
        {"__module__": __name__, "__class__": "Leaf"},
        {"__module__": __name__, "__function__": "weight_of"},
    ]
    with pytest.raises(UsageError, match="a object is not plain data"):
        to_json_object(object())


def weight_of(leaf: Leaf) -> float:
    return leaf.weight


# -- helper functions for errors and random numbers -------------------------------------------------------------------


def handled(errors: Any, tolerance: int) -> list[Any]:
    found: list[Any] = []
    context = errors.ErrorContext("step", lambda *given: found.append(given[1:]), tolerance)
    for event in (ValueError(), ValueError(), None, KeyError(), NameError(), ValueError(), ValueError()):
        try:
            with context.handle_errors({"n": 1}):
                if event is not None:
                    raise event
        except errors.FatalSampleError:
            found.append("fatal")
            context.reset()
    return found


def test_errors() -> None:
    for tolerance in (0, 1, 2):
        assert handled(hooks, tolerance) == handled(their_errors, tolerance)
    with pytest.raises(ValueError), hooks.ErrorContext("step", None).handle_errors(1):
        raise ValueError
    seen: list[Any] = []
    hooks.legacy_handler(lambda error, sample: seen.append(sample))(ValueError(), 2, None)
    hooks.legacy_handler(lambda error, sample, sources: seen.append(sources))(ValueError(), 2, 3)
    with hooks.handle_restore_errors(lambda *given: seen.append(given[2]), {"__sources__": (4,)}):
        raise ValueError
    assert seen == [2, 3, [4]]


def test_random_numbers() -> None:
    one, other = WorkerRng(ALONE), WorkerRng(ALONE)
    state, entries = one.save_state(), list(range(9))
    drawn = [one.choice(entries) for _ in range(9)]
    assert drawn == [other.randbelow(9) for _ in range(9)]
    assert [one.choice(entries, torch.eye(9)[place]) for place in (8, 3)] == [8, 3]
    mixed = one.shuffle(entries)
    assert mixed != entries == sorted(mixed) and one.rand_pop(mixed) not in mixed
    one.restore_state(state)
    assert [one.choice(entries) for _ in range(9)] == drawn
    assert {one.randbelow(9) for _ in range(99)} == {*entries} and state == WorkerRng(ALONE).save_state()
    SystemRng.seed_args(1, "a")
    saved = SystemRng.save_state()
    draws = [torch.rand(()), np.random.rand(), random.random()]
    SystemRng.seed(SystemRng.get_seed_from_args(1, "a"))
    assert draws == [torch.rand(()), np.random.rand(), random.random()]
    SystemRng.restore_state(saved)
    assert draws == [torch.rand(()), np.random.rand(), random.random()]
