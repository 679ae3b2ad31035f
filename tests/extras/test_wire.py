"""What goes over the wire comes back equal; nothing else comes out of it; and what cannot go is named."""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.batching.digests import AddressList
from energon_lite.errors import DecodeError, FatalSampleError, UsageError
from energon_lite.extras import wire
from energon_lite.loading.executors.transport import unsendable
from energon_lite.loading.makers.outcomes import Failure, Mark, Result
from tests.testing import examples


@dataclass
class Record:
    name: str
    values: Any = field(default_factory=dict)


@dataclass(slots=True)
class Slim:
    value: Any


@dataclass
class Mixed(Slim):
    """Its base class has slots, as ``Sample`` has."""

    own: Any = None


class Pair(NamedTuple):
    first: Any
    second: Any


class Plain:
    """No class of data."""


class Colour(enum.Flag):
    RED = 1
    BLUE = 2


def there_and_back(value: Any) -> Any:
    return wire.unpack(memoryview(bytearray(b"".join(wire.pack(value)))))


odd = [Colour.RED, Mark.FINE, torch.bfloat16, np.float32(3), np.str_("a"), np.datetime64("2026-01-01"), 1 << 71]
keys = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
plain = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.complex_numbers(allow_nan=False)),
        *(st.text(st.characters(codec=None)), st.binary(), st.sampled_from(odd)),
    ),
    lambda inner: st.one_of(
        *(st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(keys, inner)),
        *(st.frozensets(keys), st.sets(keys), st.builds(Record, st.text(), inner)),
        *(st.builds(Slim, inner), st.builds(Mixed, inner, inner), st.builds(Pair, inner, inner)),
    ),
    max_leaves=20,
)


@settings(max_examples=examples(100))
@given(plain)
def test_plain_values_come_back(value: Any) -> None:
    back = there_and_back(value)
    assert back == value and b"".join(wire.pack(back)) == b"".join(wire.pack(value))  # so its types are equal, too


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (4, 3)])
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.int16]
)
def test_tensors_come_back_and_can_be_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = torch.arange(1, 1 + int(np.prod(shape))).reshape(shape).to(dtype)
    back = there_and_back({"a": [value, value.mT if value.ndim > 1 else value]})["a"][0]
    assert back.dtype == dtype and torch.equal(back, value)
    back.zero_()


@pytest.mark.parametrize("dtype", ["<f4", ">i8", "|b1", "<U5", "|S3", "<M8[ns]", "<c8"])
def test_arrays_come_back_and_can_be_written(dtype: str) -> None:
    value = np.arange(6).astype("<i8").astype(dtype).reshape(2, 3)
    back = there_and_back(value)
    assert back.dtype == value.dtype and (back == value).all()
    back[0, 0] = back[1, 1]
    assert there_and_back(value[:0]).shape == (0, 3)
    assert [(one == other).all() for one, other in zip(there_and_back([value, value.T]), [value, value.T], strict=True)]


def test_jobs_and_results_come_back() -> None:
    addresses = AddressList([(0, 7, 0), (1, 3, 2)], 5)
    spans = AddressList([(0, 1, 2, 0, 9, 1)], 8)
    back = there_and_back(
        (addresses, spans, Result({"x": 1}, [Failure("a", "k", "decode", "bad", False), Mark.FINE, 3]))
    )
    assert back[0] == addresses and back[0].digest == 5 and type(back[0]) is AddressList
    assert back[1] == spans and back[1].digest == 8 and type(back[1]) is AddressList
    assert back[2].outcomes[0].reason == "bad" and back[2].outcomes[1:] == [Mark.FINE, 3]


def test_errors_come_back() -> None:
    error = DecodeError("broken", where="a.jpg", fix="mend it")
    back = there_and_back(error)
    assert type(back) is DecodeError and str(back) == str(error) and back.where == "a.jpg"
    assert str(there_and_back(OSError(2, "gone", "a.tar"))) == "[Errno 2] gone: 'a.tar'"
    parts = wire.pack(ZeroDivisionError("by zero"))
    unknown = b"".join(parts).replace(b"builtins:ZeroDivisionError", b"builtins:ZeroDivisionErrer")
    back = wire.unpack(memoryview(bytearray(unknown)))
    assert type(back) is FatalSampleError and "ZeroDivisionError: by zero" in str(back)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": [1, {"deep": Plain()}]}, "['a'][1]['deep'] is a "),
        (Record("n", {"f": lambda: 0}), "values['f'] is the function "),
        ({"o": np.array([None])}, "['o'] is a numpy.ndarray"),
        (Record("n", OrderedDict(a=1)), "values is a collections.OrderedDict"),
        ({"p": Path("x")}, "['p'] is a pathlib"),
        ({"c": Colour.RED | Colour.BLUE}, "['c'] is a tests.extras.test_wire.Colour"),
        ({"v": np.void(b"ab")}, "['v'] is a numpy.void"),
    ],
)
def test_a_value_that_cannot_be_sent_is_named(value: Any, named: str) -> None:
    with pytest.raises(TypeError) as caught:
        wire.pack(value)
    error = unsendable((value, [], 0), caught.value, wire.pack)
    assert named in str(error) and "sent to another machine" in str(error)
    with pytest.raises(TypeError, match="sparse_coo, is not sent to another machine"):
        wire.pack(torch.eye(2).to_sparse())


HERE = [f"{__name__}:Plain", f"{__name__}:Slim.__init__"]


@pytest.mark.parametrize(
    "path", [*HERE, "os:system", "builtins:object", "os:nothing.more", "builtins:tuple", "antigravity:geohash"]
)
def test_only_known_classes_of_data_are_made_and_nothing_is_imported(path: str, monkeypatch: Any) -> None:
    wire.known_class.cache_clear()
    monkeypatch.setattr(sys.modules["__main__"], "geohash", Record, raising=False)  # and that has no file
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert wire.known_class(f"{__name__}:Slim") is Slim
    with pytest.raises(UsageError, match="is no class of data that this process has imported"):
        wire.known_class(path)
    assert "antigravity" not in sys.modules
