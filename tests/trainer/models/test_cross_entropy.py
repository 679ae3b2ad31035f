"""The loss in chunks: its sums of gradients, and what its compiled half computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.tensor_parallel import OutputLayer, subtract_right
from energon_lite.trainer.parallel.mesh import build_mesh

CONFIG = ModelConfig(hidden_size=32, num_heads=4, vocab_size=200, vocab_multiple=64)
TOKENS = 1024


def head_gradient(dtype: str, chunk: int) -> torch.Tensor:
    """Of values that bfloat16 has."""
    generator = torch.Generator().manual_seed(1)
    head = OutputLayer(dataclasses.replace(CONFIG, dtype=dtype, loss_chunk=chunk), build_mesh())
    x = torch.randn(1, TOKENS, 32, generator=generator).bfloat16().to(head.weight.dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator).bfloat16() / 8)
    labels = torch.randint(0, 200, (1, TOKENS), generator=generator)
    (head(x, labels, torch.ones(1, TOKENS)) / TOKENS).backward()
    assert head.weight.grad is not None and head.weight.grad.dtype == head.weight.dtype
    return head.weight.grad.double()


def test_many_chunks_in_bfloat16_lose_nothing() -> None:
    exact = head_gradient("float64", 0)
    errors = [float((head_gradient("bfloat16", chunk) - exact).norm() / exact.norm()) for chunk in (0, 512, 64, 8)]
    assert errors == pytest.approx([errors[0]] * 4, rel=0.05) and errors[0] < 0.004


@pytest.mark.parametrize("first", [0, 64, 128])
def test_what_is_compiled_subtracts_as_the_index_does(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    generator = torch.Generator().manual_seed(2)
    grad, weights = torch.rand(40, 64, generator=generator), torch.rand(40, generator=generator)
    labels = torch.randint(0, 192, (40,), generator=generator)
    column = labels - first
    mine = (column >= 0) & (column < 64)
    column = column.masked_fill(~mine, 0)
    indexed = subtract_right(grad.clone(), column, mine, weights)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(subtract_right(grad, column, mine, weights), indexed)
    assert not torch.equal(indexed, grad)


@pytest.mark.parametrize("chunk", [0, 24])
def test_a_compiled_loss_is_the_same(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """And its graphs: one, whatever the number of tokens."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append([node.target for node in graph.graph.nodes])
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: real(function, backend=backend))
    torch._dynamo.reset()
    torch.manual_seed(3)
    made = []
    for compiled in (False, True):
        head = OutputLayer(dataclasses.replace(CONFIG, compile=compiled, loss_chunk=chunk), build_mesh())
        with torch.no_grad():
            head.weight.copy_(torch.linspace(-1, 1, head.weight.numel()).view_as(head.weight).sin())
        found = []
        for tokens in (64, 90, 13):
            x = torch.linspace(-3, 3, tokens * 32).view(1, tokens, 32).cos().requires_grad_()
            loss = head(x, torch.arange(tokens)[None] % 200, torch.ones(1, tokens))
            loss.backward()
            assert x.grad is not None and head.weight.grad is not None
            found += [loss.detach(), x.grad]
        made.append([*found, head.weight.grad])
    torch.testing.assert_close(made[1], made[0])
    assert len(graphs) == 1
