"""Each context-parallel rank's part of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import TopologyError, UsageError
from energon_lite.extras.tools import context_parallel_positions, context_parallel_slice

cuts = st.sampled_from(["zigzag", "plain"])
sizes = st.integers(1, 6)


@st.composite
def packed_rows(draw: st.DrawFn) -> tuple[int, str, list[int]]:
    """Size, cut, and the bounds of documents that can be cut."""
    size, cut = draw(sizes), draw(cuts)
    unit = 2 * size if cut == "zigzag" else size
    lengths = draw(st.lists(st.integers(0, 4).map(lambda times: times * unit), min_size=1, max_size=6))
    return size, cut, [0, *accumulate(lengths)]


@given(packed_rows())
def test_every_position_is_held_once_and_every_document_shared_evenly(row: tuple[int, str, list[int]]) -> None:
    size, cut, bounds = row
    how = {"size": size, "cut": cut, "documents": bounds}
    parts = [context_parallel_positions(bounds[-1], rank=rank, **how).tolist() for rank in range(size)]
    assert sorted(position for part in parts for position in part) == list(range(bounds[-1]))
    for start, stop in pairwise(bounds):
        held = [[position for position in part if start <= position < stop] for part in parts]
        assert {len(part) for part in held} == {(stop - start) // size}
        assert all(part == sorted(part) for part in held)


@given(packed_rows())
def test_the_zigzag_cut_gives_equal_causal_work(row: tuple[int, str, list[int]]) -> None:
    size, _, bounds = row
    doubled = [2 * bound for bound in bounds]  # so that the plain cut's lengths can be cut in zigzag, too
    work = set()
    for rank in range(size):
        positions = context_parallel_positions(doubled[-1], rank=rank, size=size, documents=doubled)
        starts = torch.tensor(doubled)[torch.searchsorted(torch.tensor(doubled), positions, right=True) - 1]
        work.add(int((positions - starts + 1).sum()))
    assert len(work) == 1


def test_small_numbers() -> None:
    assert context_parallel_positions(6, rank=1, size=3, cut="plain").tolist() == [2, 3]
    assert context_parallel_positions(12, rank=1, size=2, documents=[0, 4, 12]).tolist() == [1, 2, 6, 7, 8, 9]


@dataclass
class Packed:
    tokens: torch.Tensor
    mask: torch.Tensor
    cu_seqlens: torch.Tensor
    name: str


@given(packed_rows(), st.integers(1, 3))
def test_the_parts_of_a_batch_make_up_the_batch(row: tuple[int, str, list[int]], rows: int) -> None:
    size, cut, bounds = row
    tokens = torch.arange(rows * bounds[-1]).reshape(rows, bounds[-1])
    batch = Packed(tokens, tokens.T.float(), torch.tensor(bounds), "batch")
    whole = torch.full_like(tokens, -1)
    for rank in range(size):
        part = context_parallel_slice(
            batch, {"tokens": 1, "mask": 0}, rank=rank, size=size, cut=cut, documents="cu_seqlens"
        )
        assert type(part) is Packed and part.name == "batch" and part.cu_seqlens is batch.cu_seqlens
        assert torch.equal(part.mask.long().T, part.tokens)
        held = context_parallel_positions(bounds[-1], rank=rank, size=size, cut=cut, documents=bounds)
        whole[:, held] = part.tokens
    assert torch.equal(whole, tokens)
    assert batch.tokens is tokens, "the original changed"


def test_a_dict_is_cut_too() -> None:
    batch = {"tokens": torch.arange(8).reshape(2, 4), "key": "a"}
    part = context_parallel_slice(batch, {"tokens": -1}, rank=0, size=2)
    assert (part["tokens"].tolist(), part["key"]) == ([[0, 3], [4, 7]], "a")


@pytest.mark.parametrize(
    "error, match, arguments",
    [
        (TopologyError, "6 tokens cannot be cut into 4 equal chunks", {}),
        (TopologyError, "pad each document to a multiple of 4 tokens", {}),
        (TopologyError, "rank 2 of 2", {"rank": 2}),
        (UsageError, "cut is 'ring'", {"cut": "ring"}),
        (UsageError, r"bounds \[0, 5\] do not fill a row of 6", {"documents": [0, 5]}),
        (UsageError, "never decreasing", {"documents": [0, 5, 4, 6]}),
    ],
)
def test_what_cannot_be_cut(error: type[Exception], match: str, arguments: dict) -> None:
    with pytest.raises(error, match=match):
        context_parallel_positions(6, **{"rank": 0, "size": 2, **arguments})


@pytest.mark.parametrize(
    "match, batch, fields",
    [
        ("no tensor 'labels' in a dict", {"tokens": torch.ones(1, 4)}, {"labels": 1}),
        ("no fields are named", {"tokens": torch.ones(1, 4)}, {}),
        ("different lengths: {'a': 4, 'b': 2}", {"a": torch.ones(4), "b": torch.ones(2)}, {"a": 0, "b": 0}),
        ("fields of a list cannot be cut", [torch.ones(4)], {"a": 0}),
    ],
)
def test_batches_that_cannot_be_cut(match: str, batch: object, fields: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=match):
        context_parallel_slice(batch, fields, rank=0, size=2)
