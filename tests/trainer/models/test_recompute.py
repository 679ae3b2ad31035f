"""What recomputation saves, and what it costs: bytes that are kept, and kernels that run in the backward pass."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from energon_lite.trainer import LlamaModel, ModelConfig, build_mesh, register_attention
from energon_lite.trainer.models.sequence import sequence_part
from tests.trainer.training.host_reads import Operations

CONFIG = ModelConfig(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=176, vocab_size=32)


def shares_of(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The share of each key in each query, of as many heads."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(scores.new_ones(scores.shape[-2:]).triu(1) > 0, -torch.inf).softmax(dim=-1)


@torch.library.custom_op("recomputed::attention", mutates_args=())
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention as one operation, which torch on a processor may make of products, depending on its version."""
    return shares_of(q, k) @ v


@torch.library.custom_op("recomputed::attention_backward", mutates_args=())
def attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shares, by_share = shares_of(q, k), grad @ v.mT
    by_score = shares * (by_share - (by_share * shares).sum(dim=-1, keepdim=True)) / q.shape[-1] ** 0.5
    return by_score @ k, by_score.mT @ q, shares.mT @ grad


attention.register_autograd(
    lambda ctx, grad: attention_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
register_attention(
    "one operation", lambda q, k, v, run: attention(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1))
)


def measured(recompute: str, attention: str) -> tuple[int, Counter[str], list[torch.Tensor]]:
    """Bytes kept by the blocks, kernels of their backward pass, and gradients."""
    model = LlamaModel(dataclasses.replace(CONFIG, recompute=recompute, attention=attention), build_mesh())
    x = torch.linspace(-1, 1, 2 * 128 * 64).view(2, 128, 64).sin().requires_grad_()
    part = sequence_part(128, model.config, model.mesh)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for layer in model.layers.values():
            x = layer(x, part) if recompute != "full" else torch.utils.checkpoint.checkpoint(layer, x, part)
    kept = sum(event.self_cpu_memory_usage for event in seen.key_averages())
    with Operations() as kernels:
        (x * torch.linspace(0, 1, 64)).sum().backward()
    return kept, kernels.count(), [p.grad for p in model.layers.parameters() if p.grad is not None]


@pytest.mark.parametrize("attention", ["sdpa", "one operation"])
def test_selective_keeps_about_half_and_repeats_no_product(attention: str) -> None:
    """Batched products that torch makes attention of are repeated: their results grow with the square of a row."""
    all_kept, without, expected = measured("none", attention)
    kept, kernels, gradients = measured("selective", attention)
    assert kept < 0.65 * all_kept
    names = {"mm", *(name for name in kernels | without if "attention" in name)}
    if attention == "one operation":
        assert without["attention_backward"] == 2 and without["attention"] == 0
        names.add("bmm")
    assert {name: kernels[name] for name in names} == {name: without[name] for name in names}
    assert without["mm"] == 2 * 7 * 2 and kernels["silu"] == 2 and without["silu"] == 0
    assert len(gradients) == 18
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.slow
def test_a_smaller_budget_keeps_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the compiler's graphs hand from the forward to the backward pass."""
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch._functorch.config, "activation_memory_budget", 1.0)  # the models set it
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module: compiled(module, backend="aot_eager_decomp_partition")
    )
    kept = []
    for budget in (1.0, 0.0):
        torch._dynamo.reset()
        model = LlamaModel(dataclasses.replace(CONFIG, compile=True, recompute_budget=budget), build_mesh())
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        x = torch.ones(2, 128, 64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.layers["0"](x, sequence_part(128, CONFIG, model.mesh))
        kept.append(sum(size for place, size in sizes.items() if place not in own))
    assert kept[1] < 0.5 * kept[0]
