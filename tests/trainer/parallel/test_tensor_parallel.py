"""Layers that are cut over ranks: no rank holds a whole row, products hide sums, the loss in chunks, and refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from energon_lite.errors import TopologyError
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.llama import Attention, LlamaModel
from energon_lite.trainer.models.tensor_parallel import (
    ColumnParallelLinear,
    OutputLayer,
    Projections,
    RowParallelLinear,
    VocabParallelEmbedding,
    subtract_right,
)
from energon_lite.trainer.parallel import collectives
from energon_lite.trainer.parallel.mesh import ParallelMesh, build_mesh
from energon_lite.trainer.parallel.parameters import layout_of
from tests.trainer.parallel.late_collectives import patched
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import BASE, Layout, make_steps
from tests.trainer.training.host_reads import Operations


def test_no_rank_holds_a_row_of_all_logits(run_ranks: RunRanks) -> None:
    """Loss and gradients are those of one rank, also where most ranks have columns of padding only."""
    wide, rows = dataclasses.replace(BASE, vocab_multiple=256), make_steps()[0][1]

    def widest(rank: int) -> int:
        alone, model = LlamaModel(wide, ParallelMesh()), LlamaModel(wide, build_mesh(tp=4))
        with Operations() as operations:
            loss = model.loss_sum(rows)
            loss.backward()
        expected = alone.loss_sum(rows)
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        for whole, p in zip(alone.parameters(), model.parameters(), strict=True):
            if layout_of(p).sharded_dim is not None:
                assert whole.grad is not None and p.grad is not None
                part = layout_of(p).local_part(whole.grad, model.mesh)
                torch.testing.assert_close(p.grad, part, rtol=1e-10, atol=1e-12)
        return max(shape[-1] for _, shape in operations.found if len(shape) == 3)

    # The widest rows are a rank's 64 columns of the vocabulary; all 256 never meet.
    assert run_ranks(4, widest) == [64] * 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda mesh: ColumnParallelLinear(8, 13, mesh), "a dimension of 13 cannot be cut into tp=2"),
        (lambda mesh: RowParallelLinear(7, 8, mesh), "use tp of 1, 7"),
        (lambda mesh: VocabParallelEmbedding(9, 8, mesh), "use tp of 1, 3, 9"),
        (
            lambda mesh: Attention(ModelConfig(hidden_size=48, num_heads=6, num_kv_heads=3), mesh, output_std=1.0),
            "3 key heads cannot be cut into tp=2",
        ),
    ],
)
def test_what_cannot_be_cut_evenly_is_refused(make: Callable[[ParallelMesh], Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        make(ParallelMesh(tp=2))


# -- the input's gradient, which is summed over ranks behind the weights' gradients ------------------------------------


class Together(Projections):
    def layers(self) -> list[ColumnParallelLinear]:
        return list(self.children())  # type: ignore[arg-type]


class NotedWork:
    """A collective that is noted among the operations when it is launched, and when somebody waits for it."""

    def __init__(self, operations: Operations, collective: Any, *args: Any, **settings: Any):
        self.found = operations.found
        self.found.append(("sum", ()))
        self.work = collective(*args, **settings)

    def wait(self) -> None:
        self.found.append(("wait", ()))
        self.work.wait()


@pytest.mark.parametrize("sequence", [False, True])
def test_weights_are_done_while_the_input_is_summed(run_ranks: RunRanks, sequence: bool) -> None:
    def check(rank: int) -> None:
        mesh = Layout(tp=2, sp=sequence).mesh()
        layers = [ColumnParallelLinear(6, n, mesh, dtype=torch.float64, bias=True) for n in (4, 8, 2)]
        generator = torch.Generator().manual_seed(rank)
        for p in (p for layer in layers for p in layer.parameters()):
            torch.nn.init.normal_(p, generator=generator)
        alike = torch.Generator().manual_seed(5 + (rank if sequence else 0))
        x = torch.randn(3, 4, 6, dtype=torch.float64, generator=alike).requires_grad_()

        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        together = Together(mesh)
        for number, layer in enumerate(layers):
            together.add_module(str(number), layer)

        def gradients(made: Any) -> list[torch.Tensor]:
            loss = sum((y.sin() * (i + 1)).sum() for i, y in enumerate(made))
            assert isinstance(loss, torch.Tensor)
            return [*torch.autograd.grad(loss, [x, *weights, *biases])]

        entered = layers[0].enter(x)
        expected = gradients([layer(entered, entered=True) for layer in layers])
        operations = Operations()
        places = (dist, ["all_reduce"]), (collectives, ["reduce_scatter"])
        with patched(lambda _, collective: partial(NotedWork, operations, collective), *places):
            made = together.project(x)
            with operations:
                found = gradients(made)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
        product = "aten.mm.default"
        seen = [name for name, _ in operations.found if name in (product, "aten.bmm.default", "sum", "wait")]
        assert seen == [product] * 3 + ["sum"] + [product] * 3 + ["wait"]

    run_ranks(2, check)


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
