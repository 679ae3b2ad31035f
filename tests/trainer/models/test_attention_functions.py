"""Which attention a configuration means, and what a kernel for documents of any length is told."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.trainer.models import attention_functions
from energon_lite.trainer.models.attention_functions import (
    choose_attention,
    dense_mask,
    describe_attention,
    document_segments,
    packed_bounds,
    sdpa,
    varlen,
    varlen_kernel,
    window_mask,
)
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.registry import Run
from energon_lite.trainer.models.sequence import lengths_of_rows
from tests.testing import examples

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def one_by_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_bounds: torch.Tensor,
    k_bounds: torch.Tensor,
    most_q: int,
    most_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What ``varlen_attn`` promises, ``[tokens, heads, width]``: the diagonal of each document ends lower right."""
    assert window_size[1] == 0 and enable_gqa == (q.shape[1] != k.shape[1])
    assert q_bounds.dtype == k_bounds.dtype == torch.int32
    made = torch.full_like(q, torch.nan)
    assert (most_q, most_k) == tuple(max(bounds.diff().tolist()) for bounds in (q_bounds, k_bounds)), "not a row's"
    for (first, last), (begin, end) in zip(pairwise(q_bounds.tolist()), pairwise(k_bounds.tolist()), strict=True):
        if first < last:
            keys, values = (x[begin:end].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            scores = torch.einsum("qhw,khw->hqk", q[first:last], keys) / q.shape[-1] ** 0.5
            diagonal = end - begin - (last - first)
            hidden = torch.ones(last - first, end - begin).triu(diagonal + 1).bool()
            if window_size[0] >= 0:
                hidden |= torch.ones_like(hidden).tril(diagonal - window_size[0] - 1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            made[first:last] = torch.einsum("hqk,khw->qhw", weights, values)
    return made


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_functions, "_varlen_attn", lambda: one_by_one)
    monkeypatch.setattr(attention_functions, "has_varlen_kernel", lambda device, dtype: True)


@pytest.mark.usefixtures("kernel")
def test_one_kernel_sees_what_a_mask_shows() -> None:
    @settings(max_examples=examples(30), deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        rows, length, start = (data.draw(st.integers(low, high)) for low, high in ((1, 3), (1, 9), (0, 5)))
        numbers = st.lists(st.integers(0, 2), min_size=start + length, max_size=start + length)
        documents = torch.tensor([data.draw(numbers) for _ in range(rows)]).cumsum(1)
        generator = torch.Generator().manual_seed(1)
        q, k, v = (
            torch.randn(rows, heads, n, 4, generator=generator, dtype=torch.float64)
            for heads, n in ((4, length), (2, start + length), (2, start + length))
        )
        rows = lengths_of_rows(documents, None)
        masks = dense_mask(documents, start, length), document_segments(rows, start, length)
        masks = *masks, packed_bounds(rows, start, length, CPU)
        made = [
            function(q, k, v, Run(start, length, mask))
            for function, mask in zip((sdpa, varlen, varlen_kernel), masks, strict=True)
        ]
        for other in made[1:]:
            torch.testing.assert_close(other, made[0])
        alone = sdpa(q, k, v, Run(start, length, dense_mask(torch.zeros_like(documents), start, length)))
        torch.testing.assert_close(varlen_kernel(q, k, v, Run(start, length)), alone)
        window = data.draw(st.integers(1, start + length))
        near = window_mask(window, start, length, CPU)
        for mask, bounds in ((near, None), (near & masks[0], masks[2])):
            one = varlen_kernel(q, k, v, Run(start, length, bounds, window))
            torch.testing.assert_close(one, sdpa(q, k, v, Run(start, length, mask)))

    check()


@pytest.mark.parametrize(
    ("name", "dtype", "device", "compile", "kernel", "chosen"),
    [
        ("auto", "bfloat16", GPU, True, True, "varlen_kernel"),
        ("varlen", "bfloat16", GPU, False, True, "varlen_kernel"),
        ("auto", "float32", GPU, True, True, "sdpa"),
        ("auto", "bfloat16", GPU, False, False, "sdpa"),
        ("varlen", "bfloat16", GPU, False, False, "varlen"),
        ("auto", "bfloat16", CPU, False, True, "varlen"),
        ("auto", "float64", CPU, True, True, "sdpa"),
        ("sdpa", "bfloat16", GPU, True, True, "sdpa"),
    ],
)
def test_auto_is_the_best_of_a_device(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: str,
    device: torch.device,
    compile: bool,
    kernel: bool,
    chosen: str,
) -> None:
    there: Callable[..., torch.Tensor] | None = one_by_one if kernel else None
    monkeypatch.setattr(attention_functions, "_varlen_attn", lambda: there)
    config = ModelConfig(attention=name, dtype=dtype, compile=compile)
    assert choose_attention(config, device).function.__name__ == chosen


def test_torch_has_the_kernel_that_is_meant() -> None:
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        pytest.skip("an older torch")
    assert attention_functions._varlen_attn() is not None


def test_what_is_used_can_be_said() -> None:
    assert describe_attention(ModelConfig(num_kv_heads=2), CPU, 32) == "flash_attention; packed rows: varlen"
