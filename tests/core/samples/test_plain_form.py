"""A value comes back from its plain form as it was, and other bytes are an error of one kind."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from energon_lite import CaptioningSample, TextSample, edataclass
from energon_lite.errors import DecodeError
from energon_lite.samples import SourceInfo
from energon_lite.samples.plain_form import NotPlainError, from_plain, to_plain


class Pair(NamedTuple):
    left: Any
    right: Any


@edataclass
class Mine(TextSample):
    more: Any = None


def form_of(value: Any) -> bytearray:
    return bytearray(b"".join(to_plain(value)))


KINDS = (*(getattr(torch, name) for name in ("float32", "bfloat16", "int64", "uint8", "bool")),)
tensors = st.builds(
    lambda shape, kind, turn: torch.arange(int(np.prod(shape))).reshape(shape).to(kind).movedim(0, -1 if turn else 0),
    st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    st.sampled_from(KINDS),
    st.booleans(),
)
arrays = npst.arrays(
    st.one_of(npst.integer_dtypes(), npst.boolean_dtypes(), npst.datetime64_dtypes(), npst.unicode_string_dtypes()),
    npst.array_shapes(min_dims=0, min_side=0),
)
leaves = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    *(tensors, arrays, st.integers(-9, 9).map(np.int16), st.floats(width=32, allow_nan=False).map(np.float32)),
)
keys = st.one_of(st.text(), st.integers(-(2**63), 2**63 - 1), st.tuples(st.integers(-9, 9), st.text()))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.builds(Pair, inner, inner),
        st.builds(lambda more: Mine(__key__="a", __restore_key__=("sample", (0, 1)), text="t", more=more), inner),
    ),
    max_leaves=12,
)


@given(value=values)
def test_values_come_back(value: Any, same: Callable[..., bool]) -> None:
    form = form_of(value)
    back = from_plain(memoryview(form))
    assert same(back, value) and repr(type(back)) == repr(type(value))
    assert form_of(back) == form


def test_a_sample_comes_back_with_its_type(same: Callable[..., bool]) -> None:
    source = SourceInfo(dataset_path="d", index=3, shard_name="s", file_names=("a.jpg",))
    image = torch.rand(3, 4, 5)[:, ::2]
    base = {"__key__": "k", "__restore_key__": ("s", 1), "__subflavors__": {"a": [1]}, "__sources__": (source,)}
    sample = CaptioningSample(**base, image=image, caption="é")
    back = from_plain(memoryview(form_of(sample)))
    assert type(back) is CaptioningSample and same(back, sample) and back.__sources__ == (source,)


@given(values, st.data())
def test_other_bytes_are_an_error_or_another_value(value: Any, data: st.DataObject) -> None:
    form = form_of(value)
    how = data.draw(st.sampled_from(["cut", "flip", "random"]))
    if how == "cut":
        form = form[: data.draw(st.integers(0, len(form)))]
    elif how == "flip":
        form[data.draw(st.integers(0, len(form) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        form = bytearray(data.draw(st.binary(max_size=80)))
    try:
        from_plain(memoryview(form))
    except DecodeError as error:
        assert re.search("cannot be read", str(error))


class Code:
    ran = False

    def __init__(self) -> None:
        Code.ran = True


def test_only_records_are_made() -> None:
    Code.ran = False
    form = form_of(Pair(1, 2)).replace(b"\xa4Pair", b"\xa4Code")
    with pytest.raises(DecodeError, match="no class with the fields left, right"):
        from_plain(memoryview(form))
    assert not Code.ran


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1},
        datetime.date(2020, 1, 1),
        np.array([object()]),
        torch.ones(2, requires_grad=True),
        torch.eye(2).to_sparse(),
        {"deep": [Code()]},
    ],
)
def test_what_has_no_plain_form(value: Any) -> None:
    with pytest.raises(NotPlainError, match="has no plain form"):
        to_plain(value)
