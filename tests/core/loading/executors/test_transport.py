"""Objects between processes: equal on the other side, tensors without copies in pickles."""

from __future__ import annotations

import multiprocessing
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import TextSample
from energon_lite.loading.executors.transport import WholeMessages, pack, send
from tests.testing import received


def through_a_pipe(value: Any) -> Any:
    """What the other side of a pipe gets; a thread sends, because a pipe holds little."""
    ours, theirs = multiprocessing.Pipe()
    with ThreadPoolExecutor(1) as pool, ours, theirs:
        sent = pool.submit(send, theirs, pack(value))
        obj = received(ours)
        sent.result()
    return obj


TENSORS: dict[str, torch.Tensor] = {
    "float": torch.randn(3, 4),
    "bfloat16": torch.randn(5).to(torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "int8": torch.arange(7, dtype=torch.int8),
    "complex": torch.randn(2, dtype=torch.complex64),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0, 3, dtype=torch.int32),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "strided": torch.arange(10)[::2],
    "expanded": torch.ones(1).expand(4),
    "needs grad": torch.ones(2, requires_grad=True),
    "conjugated": torch.randn(2, dtype=torch.complex64).conj(),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name: str) -> None:
    tensor = TENSORS[name]
    (again,) = through_a_pipe([tensor])
    assert again.dtype == tensor.dtype and again.shape == tensor.shape
    assert torch.equal(again.to_dense(), tensor.to_dense())
    assert again.requires_grad == tensor.requires_grad


def test_what_arrives_can_be_written_to() -> None:
    again = through_a_pipe({"t": torch.zeros(5), "n": np.zeros(5)})
    again["t"] += 1
    again["n"] += 1
    assert again["t"].sum() == 5 and again["n"].sum() == 5


@given(
    st.recursive(
        st.one_of(st.none(), st.integers(), st.text(), st.binary(max_size=200), st.floats(allow_nan=False)),
        lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner), st.tuples(inner, inner)),
    ),
    st.lists(st.integers(0, 300), max_size=5),
)
def test_any_structure(value: Any, sizes: list[int]) -> None:
    tensors = [torch.arange(size, dtype=torch.int16) for size in sizes]
    again, tensors_again = through_a_pipe((value, tensors))
    assert again == value
    assert all(map(torch.equal, tensors, tensors_again))


def test_thousands_of_tensors() -> None:
    tensors = [torch.full((number % 7,), number) for number in range(3000)]
    assert all(map(torch.equal, through_a_pipe(tensors), tensors))


def test_the_other_side_is_gone() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with pytest.raises(OSError):
        send(ours, pack([torch.zeros(1_000_000)]))
    ours, theirs = multiprocessing.Pipe()
    theirs.send_bytes(b"")  # a beginning of nothing
    theirs.close()
    with pytest.raises(EOFError):
        received(ours)


def test_samples_and_big_messages_through_a_pipe() -> None:
    ours, theirs = multiprocessing.Pipe()
    sample = TextSample(__key__="k", __restore_key__=("sample", 0, 1, 2, 0), text="x")
    big = torch.arange(2_000_000)

    def other_side() -> None:
        send(theirs, pack((received(theirs), big)))

    process = multiprocessing.get_context("fork").Process(target=other_side)
    process.start()
    send(ours, pack(sample))
    again, tensor = received(ours)
    process.join()
    assert again == sample and torch.equal(tensor, big)


def test_whole_messages_are_told_from_parts() -> None:
    ours, theirs = multiprocessing.Pipe(duplex=True)
    peek = WholeMessages(theirs)
    assert not peek.is_one_here()
    body = b"".join(bytes(part) for part in pack({"jobs": list(range(100))}))
    lead = struct.pack("<2Q", len(body), 0)
    for part, is_whole in ((lead[:7], False), (lead[7:], False), (body[:50], False), (body[50:], True)):
        os.write(ours.fileno(), part)
        assert peek.is_one_here() is is_whole
    assert received(theirs) == {"jobs": list(range(100))} and not peek.is_one_here()
    ours.close()
    assert not peek.is_one_here()
