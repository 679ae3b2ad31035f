"""Default collation, and batches without samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import Batch, CaptioningSample, DefaultTaskEncoder, Sample, TextSample, edataclass, get_train_dataset
from energon_lite.batching import batch_list, batch_pad_stack, batch_stack, generic_batch
from energon_lite.batching.collate import empty_like
from energon_lite.errors import FatalSampleError, UnlikeError, UsageError
from tests.testing import ALONE


@dataclass
class Plain:
    x: torch.Tensor
    name: str


@dataclass
class Sized(Plain):
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.x)


class Named(NamedTuple):
    x: torch.Tensor
    name: str


@edataclass
class Images(Batch):
    image: torch.Tensor
    caption: list[str]


def _caption(number: int) -> CaptioningSample:
    return CaptioningSample(
        __key__=str(number),
        __restore_key__=("sample", 0, number, 0, 0),
        __subflavors__={"n": number},
        image=torch.full((1, number, 2), float(number)),
        caption="x" * number,
    )


def test_stacking_padding_and_listing() -> None:
    assert batch_stack([1, 2]).tolist() == [1, 2]
    assert batch_list((1, "a")) == [1, "a"]
    with pytest.raises(RuntimeError):
        batch_stack([torch.ones(1), torch.ones(2)])
    with pytest.raises(UsageError, match=r"unequal rank cannot be padded to one: \[1\], \[1, 1\]"):
        batch_pad_stack([torch.ones(1), torch.ones(1, 1)])


@pytest.mark.parametrize("kind", [dict, Plain, Sized, Named])
def test_collation_keeps_the_type(kind: Any) -> None:
    made = [kind(x=torch.ones(n), name=f"n{n}") for n in (1, 2)]
    batch = generic_batch(made, padding=0)
    assert type(batch) is kind
    x, name = (batch["x"], batch["name"]) if kind is dict else (batch.x, batch.name)
    assert x.tolist() == [[1, 0], [1, 1]] and name == ["n1", "n2"]


def test_other_values_become_lists() -> None:
    assert generic_batch([1, 2]) == [1, 2]
    assert [type(value) for value in generic_batch([np.ones(1), np.ones(2)])] == [np.ndarray] * 2
    assert generic_batch([1, None, "a"]) == [1, None, "a"]


def test_samples_become_one_of_their_type_with_lists_of_base_fields() -> None:
    batch = DefaultTaskEncoder(padding=0).batch([_caption(1), _caption(2)])
    assert isinstance(batch, CaptioningSample)
    assert batch.__key__ == ["1", "2"] and batch.__subflavors__ == [{"n": 1}, {"n": 2}]
    assert batch.image.shape == (2, 1, 2, 2) and batch.caption == ["x", "xx"]


@pytest.mark.parametrize("kind", [dict, Plain, Named])
def test_fields_are_copied_into_the_types_that_are_asked_for(kind: Any) -> None:
    class Source(NamedTuple):
        x: torch.Tensor
        name: str
        more: int

    encoder = DefaultTaskEncoder(encoded_sample_type=kind, raw_batch_type=dict, batch_type=kind, padding={"x": 0})
    encoded = [encoder.encode_sample(Source(torch.ones(n), f"n{n}", 5)) for n in (1, 2)]
    raw = encoder.batch(encoded)
    assert type(encoded[0]) is kind and type(raw) is dict
    batch = encoder.encode_batch(raw)
    assert type(batch) is kind


def test_batch_from_samples() -> None:
    batch = Images.from_samples([_caption(1), _caption(2)], caption=["given"])
    assert batch.image.shape == (2, 1, 2, 2) and batch.caption == ["given"]
    assert batch.__key__ == ["1", "2"] and len(batch.__restore_key__) == 2

    @edataclass
    class Scaled(Images):
        scale: float
        size: int = field(init=False, default=2)

    assert Scaled.from_samples([Sized(torch.ones(1), "a")], image=[], caption=[], scale=2.0).size == 2
    assert Scaled.derive_from(batch, image=batch.image, caption=[], scale=2.0).__key__ == ["1", "2"]
    assert Scaled.extend(batch, scale=2.0).image is batch.image
    with pytest.raises(UsageError, match="Images does not extend Scaled"):
        Images.extend(Scaled.extend(batch, scale=2.0))
    encoder = DefaultTaskEncoder(raw_batch_type=Images)
    assert isinstance(encoder.batch([_caption(1)]), Images)


TENSORS = st.builds(
    lambda shape, dtype: torch.ones(shape, dtype=dtype),
    st.lists(st.integers(0, 2), max_size=2),
    st.sampled_from([torch.int64, torch.float32]),
)


@given(values=st.lists(TENSORS, min_size=1, max_size=3), padding=st.sampled_from([None, 0, 7, "list", {"x": 7}]))
def test_tensors_are_stacked_where_alike_and_else_only_as_asked_for(values: list[torch.Tensor], padding: Any) -> None:
    shapes, ranks = {value.shape for value in values}, {value.dim() for value in values}
    one_type = len({value.dtype for value in values}) == 1
    samples = [{"__key__": f"key {number}", "x": value} for number, value in enumerate(values)]
    if len(shapes) == 1 and one_type:
        assert torch.equal(generic_batch(samples, padding)["x"], torch.stack(values))
    elif padding == "list":
        assert all(one is other for one, other in zip(generic_batch(samples, padding)["x"], values, strict=True))
    elif padding is None or len(ranks) > 1 or not one_type:
        wrong = "numbers of dimensions" if len(ranks) > 1 else "sizes" if one_type else "types of numbers"
        with pytest.raises(UnlikeError, match=f"the 'x' of the samples of one batch have unequal {wrong}: ") as caught:
            generic_batch(samples, padding)
        assert "key 0" in str(caught.value) and f"shape {list(values[-1].shape)}" in str(caught.value)
    else:
        padded, pad = generic_batch(samples, padding)["x"], 0 if padding == 0 else 7
        for row, value in zip(padded, values, strict=True):
            assert int((row == 1).sum()) == value.numel() and int((row == pad).sum()) == row.numel() - value.numel()


def test_what_is_not_alike_is_named(leaf_of: Any) -> None:
    with pytest.raises(UnlikeError, match=r"'image' of .* unequal sizes: shape \[1, 1, 2\]: 1; shape \[1, 2, 2\]: 2"):
        DefaultTaskEncoder().batch([_caption(1), _caption(2)])
    kinds = r"'a\.b' of .* unequal types: shape \[1\]: sample 0; NoneType: sample 1"
    with pytest.raises(UnlikeError, match=kinds) as caught:
        generic_batch([{"a": {"b": torch.ones(1)}}, {"a": {"b": None}}])
    assert caught.value.where is None
    with pytest.raises(UnlikeError, match=r"have unequal entries: entries a, b: sample 0; entries a: sample 1"):
        generic_batch([{"a": 1, "b": 2}, {"a": 1}])
    with pytest.raises(UnlikeError, match=r"'image' of the samples"):
        DefaultTaskEncoder(raw_batch_type=Images).batch([_caption(1), _caption(2)])
    with pytest.raises(FatalSampleError, match="padding = 0"):
        generic_batch([torch.ones(1), torch.ones(2)])
    assert generic_batch([{"a": {"b": 1}}, {"a": None}], {"a": "list"}) == {"a": [{"b": 1}, None]}
    assert DefaultTaskEncoder(raw_batch_type=Images, padding=5).batch([_caption(1), _caption(2)]).image[0, 0, 1, 0] == 5


@pytest.mark.parametrize("padding", [True, "zeros", {"x": "pad"}, {"x": True}])
def test_no_padding(leaf_of: Any, padding: Any) -> None:
    with pytest.raises(UsageError, match="padding is") as caught:
        encoder = DefaultTaskEncoder(padding=padding)
        get_train_dataset(leaf_of(5), batch_size=2, worker_config=ALONE, task_encoder=encoder)
    assert caught.value.fix


def test_joining_samples() -> None:
    text = TextSample(__key__="t", __restore_key__=(), text="hello")

    @edataclass
    class Both(Sample):
        image: torch.Tensor
        caption: str
        text: str

    joined = Both.from_joined(_caption(1), None, text)
    assert (joined.__key__, joined.caption, joined.text) == ("1", "x", "hello")
    with pytest.raises(UsageError, match="first of the joined samples"):
        Both.from_joined(None, text)


def test_empty_batches_keep_their_form() -> None:
    batch = Images.from_samples([_caption(1), _caption(2)])
    empty = empty_like(batch, 2)
    assert isinstance(empty, Images)
    assert empty.image.shape == (0, 1, 2, 2) and empty.caption == [] and empty.__key__ == []
    assert batch.image.shape[0] == 2  # the example stays as it is
    plain = empty_like({"x": torch.ones(2, 3), "scale": torch.tensor(2.0), "names": ("a", "b"), "n": 7}, 2)
    assert plain["x"].shape == (0, 3) and plain["scale"] == 2.0 and plain["names"] == () and plain["n"] == 7
    others = {"x": torch.ones(3, 2), "names": ["a", "b", "c"], "pair": (1, 2, 3)}  # not of the samples
    assert empty_like(others, 2) == others
    assert empty_like(Named(torch.ones(2), "ab"), 2).x.shape == (0,)
    assert empty_like(Plain(torch.ones(2), "ab"), 2).name == "ab"
    arrays = empty_like({"x": np.ones((2, 3)), "other": np.ones(3), "scale": np.array(2.0)}, 2)
    assert [array.shape for array in arrays.values()] == [(0, 3), (3,), ()]


@given(
    shapes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5),
    dtypes=st.lists(
        st.sampled_from([torch.int32, torch.float32, torch.bfloat16, torch.bool]), min_size=1, max_size=2, unique=True
    ),
    flipped=st.booleans(),
    gradient=st.booleans(),
)
def test_padding_of_any_tensors(
    shapes: list[tuple[int, int]], dtypes: list[torch.dtype], flipped: bool, gradient: bool
) -> None:
    values = []
    for number, (height, width) in enumerate(shapes):
        value = (torch.arange(height * width).reshape(height, width) + number).to(dtypes[number % len(dtypes)])
        values.append(value.t() if flipped else value)
    if gradient and values[0].is_floating_point():
        values[0].requires_grad_()
    batch = batch_pad_stack(values)
    assert batch.dtype == values[0].dtype or len({value.shape for value in values}) == 1
    for row, value in zip(batch, values, strict=True):
        inside = tuple(slice(size) for size in value.shape)
        assert torch.equal(row[inside], value.to(batch.dtype))
        assert int(row.to(torch.float64).count_nonzero()) == int(value.to(batch.dtype).count_nonzero())
