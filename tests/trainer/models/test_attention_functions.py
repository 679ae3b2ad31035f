"""Which attention a configuration means, and what a kernel for documents of any length is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.trainer.models import named_layers
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.interface import document_lengths
from energon_lite.trainer.models.named_layers import (
    Run,
    choose_attention,
    dense_mask,
    packed_bounds,
    sdpa,
    varlen,
    window_mask,
)
from energon_lite.trainer.models.sequence import lengths_of_rows
from tests.testing import examples
from tests.trainer.models.by_documents import one_by_one

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_one_kernel_sees_what_a_mask_shows(monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    monkeypatch.setattr(named_layers, "_varlen_attn", lambda: one_by_one)
    monkeypatch.setattr(named_layers, "has_varlen_kernel", lambda device, dtype: True)
    rows, length, start = (data.draw(st.integers(low, high)) for low, high in ((1, 3), (1, 9), (0, 5)))
    numbers = st.lists(st.integers(0, 2), min_size=start + length, max_size=start + length)
    documents = torch.tensor([data.draw(numbers) for _ in range(rows)]).cumsum(1)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(rows, heads, n, 4, generator=generator, dtype=torch.float64)
        for heads, n in ((4, length), (2, start + length), (2, start + length))
    )
    lengths = lengths_of_rows(document_lengths(documents), rows)
    masks = dense_mask(lengths, start, length, CPU), packed_bounds(lengths, start, length, CPU)
    earlier = torch.ones(length, start + length).tril(start).bool()
    seen = (documents[:, start:, None] == documents[:, None]) & earlier
    assert torch.equal(masks[0], seen[:, None])
    made = [function(q, k, v, Run(start, length, mask)) for function, mask in zip((sdpa, varlen), masks, strict=True)]
    torch.testing.assert_close(*made)
    alone = sdpa(q, k, v, Run(start, length, dense_mask([[start + length]] * rows, start, length, CPU)))
    torch.testing.assert_close(varlen(q, k, v, Run(start, length)), alone)
    window = data.draw(st.integers(1, start + length))
    near = window_mask(window, start, length, CPU)
    for mask, bounds in ((near, None), (near & masks[0], masks[1])):
        one = varlen(q, k, v, Run(start, length, bounds, window))
        torch.testing.assert_close(one, sdpa(q, k, v, Run(start, length, mask)))


@pytest.mark.parametrize(
    ("name", "dtype", "device", "kernel", "chosen"),
    [
        ("auto", "bfloat16", GPU, one_by_one, "varlen"),
        ("varlen", "bfloat16", GPU, one_by_one, "varlen"),
        ("auto", "float32", GPU, one_by_one, "sdpa"),
        ("auto", "bfloat16", GPU, None, "sdpa"),
        ("auto", "bfloat16", CPU, one_by_one, "sdpa"),
        ("sdpa", "bfloat16", GPU, one_by_one, "sdpa"),
    ],
)
def test_auto_is_the_best_of_a_device(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, device: torch.device, kernel: Any, chosen: str
) -> None:
    monkeypatch.setattr(named_layers, "_varlen_attn", lambda: kernel)
    assert choose_attention(ModelConfig(attention=name, dtype=dtype), device).function.__name__ == chosen


def test_torch_has_the_kernel_that_is_meant() -> None:
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        pytest.skip("an older torch")
    assert named_layers._varlen_attn() is not None
