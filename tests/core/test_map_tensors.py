"""Copies of nested structures with other tensors in them, and the fields of what can be in such a structure."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import Batch, edataclass
from energon_lite.tensors import fields_of, map_tensors

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Frozen:
    inner: Any


@edataclass
class Slotted:
    inner: Any


@dataclass
class Counted:
    """What a second run of ``__post_init__`` would break, with a field that ``__init__`` does not take."""

    inner: Any
    copies: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.copies += 1


def tensors_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)
    return found


leaves = st.integers(0, 9).map(lambda number: torch.tensor([number])) | st.sampled_from(
    [None, 3, "text", b"bytes", 2.5]
)
structures = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner),
        st.dictionaries(st.sampled_from("abc"), inner).map(OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Frozen, inner),
        st.builds(Counted, inner),
        st.builds(lambda value: Slotted(inner=value), inner),
    ),
    max_leaves=12,
)


@given(structures)
def test_only_the_tensors_change(value: Any) -> None:
    before = [tensor.clone() for tensor in tensors_in(value)]
    mapped = map_tensors(lambda tensor: tensor + 10, value)
    assert type(mapped) is type(value)
    assert [int(tensor) for tensor in tensors_in(mapped)] == [int(tensor) + 10 for tensor in before]
    assert [int(tensor) for tensor in tensors_in(value)] == [int(tensor) for tensor in before], "the original changed"
    assert str(map_tensors(lambda tensor: tensor - 10, mapped)) == str(value)


def test_a_dict_keeps_its_kind() -> None:
    value = defaultdict(list, a=torch.ones(1))
    assert map_tensors(torch.neg, value)["missing"] == []


def test_a_registered_type_is_looked_into() -> None:
    class Ragged:
        def __init__(self, rows: list[torch.Tensor], name: str):
            self.rows, self.name = rows, name

    torch.utils._pytree.register_pytree_node(
        Ragged, lambda ragged: (ragged.rows, ragged.name), lambda rows, name: Ragged(list(rows), name)
    )
    mapped = map_tensors(torch.neg, Ragged([torch.ones(2), torch.ones(3)], "r"))
    assert mapped.name == "r"
    assert [row.tolist() for row in mapped.rows] == [[-1, -1], [-1, -1, -1]]


def test_a_batch_moves_with_all_that_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    @edataclass
    class Images(Batch):
        image: torch.Tensor
        boxes: list[torch.Tensor]

    boxes = [torch.zeros(1), torch.zeros(3)]
    batch = Images(__key__=["a"], __restore_key__=("batch", 0, 0), image=torch.zeros(2, 2), boxes=boxes)
    moved = batch.to("meta")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 100)  # there may be no CUDA here
    pinned = batch.pin_memory()
    assert type(moved) is type(pinned) is Images
    assert {tensor.device.type for tensor in (moved.image, *moved.boxes)} == {"meta"}
    assert all(bool((tensor == 100).all()) for tensor in (pinned.image, *pinned.boxes))
    assert (
        (moved.__key__, moved.__restore_key__) == (pinned.__key__, pinned.__restore_key__) == (["a"], ("batch", 0, 0))
    )
    assert batch.image.device.type == "cpu" and not batch.image.any()


def test_fields_of_what_has_some() -> None:
    half = Counted(1)
    del half.copies  # its class has a default
    assert fields_of({"a": 1}) == {"a": 1} and fields_of(Pair(1, 2)) == {"left": 1, "right": 2}
    assert fields_of(Frozen(1)) == {"inner": 1} and fields_of(half) == {"inner": 1, "copies": 0}
    assert [fields_of(value) for value in (Frozen, Pair, [1], (1,), "text", None)] == [None] * 6


@edataclass
class Unset:
    inner: torch.Tensor
    later: Any = field(init=False)


def test_a_field_without_a_value_stays_without_one() -> None:
    mapped = map_tensors(lambda tensor: tensor + 1, Unset(inner=torch.zeros(1)))
    assert fields_of(mapped) == {"inner": torch.ones(1)}
