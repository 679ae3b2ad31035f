"""The cut layers and the loss against torch's whole ones: values, gradients, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from energon_lite.errors import TopologyError
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.cross_entropy import vocab_parallel_cross_entropy
from energon_lite.trainer.models.llama import Attention, LlamaModel
from energon_lite.trainer.models.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from energon_lite.trainer.parallel.mesh import ParallelMesh, build_mesh
from energon_lite.trainer.parallel.parameters import initialize_parameters, layout_of
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import BASE, make_steps

X = torch.linspace(-1, 1, 3 * 8, dtype=torch.float64).view(3, 8)
F64: Any = {"dtype": torch.float64, "std": 0.5}


def drawn(module: torch.nn.Module, mesh: ParallelMesh) -> Any:
    """Give a module its initial weights, and biases that are not zero."""
    initialize_parameters(module, seed=3, mesh=mesh)
    for p in module.parameters():
        p.data.add_(p.dim() == 1)
    return module


def whole(make: Callable[[ParallelMesh], torch.nn.Module]) -> dict[str, torch.Tensor]:
    """The uncut weights of a module: those that one process alone would have."""
    alone = drawn(make(ParallelMesh()), ParallelMesh())
    return {name: p.detach().requires_grad_() for name, p in alone.named_parameters()}


def assert_gradients(module: torch.nn.Module, weights: dict[str, torch.Tensor], mesh: ParallelMesh) -> None:
    for name, p in module.named_parameters():
        full = weights[name].grad
        assert full is not None and p.grad is not None
        torch.testing.assert_close(p.grad, layout_of(p).local_part(full, mesh), rtol=1e-12, atol=1e-12)


def check_layer(mesh: ParallelMesh, make: Callable[[ParallelMesh], Any], expect: Callable[[Any, Any], Any]) -> None:
    """Output, and gradients of input and weights, of a cut module and of torch's function of the uncut weights."""
    module = drawn(make(mesh), mesh)
    weights, x, y = whole(make), X.clone().requires_grad_(), X.clone().requires_grad_()
    out, expected = module(x), expect(weights, y)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-12)
    assert_gradients(module, weights, mesh)


def check_embedding(mesh: ParallelMesh) -> None:
    def make(mesh: ParallelMesh) -> VocabParallelEmbedding:
        return VocabParallelEmbedding(8, 6, mesh, **F64)

    module = drawn(make(mesh), mesh)
    w, tokens = whole(make), torch.tensor([[0, 7, 3], [3, 3, 5]])
    out, expected = module(tokens), F.embedding(tokens, w["weight"])
    assert torch.equal(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert_gradients(module, w, mesh)


def check_cross_entropy(mesh: ParallelMesh, vocab: int) -> None:
    """Torch's, over the real vocabulary."""
    full = (torch.arange(2 * 3 * 8, dtype=torch.float64) % 7).view(2, 3, 8) * 3 - 9
    mine = full.chunk(mesh.tp, dim=-1)[mesh.rank("tp")].clone().requires_grad_()
    full.requires_grad_()
    labels = torch.tensor([[0, 2, 1], [vocab - 1, 0, 2]])
    weight = torch.tensor([[1.0, 0.0, 2.0], [0.5, 1.0, 0.0]], dtype=torch.float64)
    loss = vocab_parallel_cross_entropy(mine, labels, mesh, vocab_size=vocab)
    expected = F.cross_entropy(full[..., :vocab].transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    (loss * weight).sum().backward()
    (expected * weight).sum().backward()
    assert full.grad is not None
    here = full.grad.chunk(mesh.tp, dim=-1)[mesh.rank("tp")]
    torch.testing.assert_close(mine.grad, here, rtol=1e-12, atol=1e-12)


def check_half_precision(mesh: ParallelMesh) -> None:
    logits = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([0, 3]), mesh)
    loss.sum().backward()
    assert loss.dtype == torch.float32 and logits.grad is not None and logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss, torch.full((2,), 4.0 * mesh.tp).log())


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_cut_layers_and_losses_are_torchs_whole_ones(run_ranks: RunRanks, tp: int) -> None:
    def two(mesh: ParallelMesh, bias: bool) -> torch.nn.Sequential:
        column = ColumnParallelLinear(8, 12, mesh, bias=bias, **F64)
        return torch.nn.Sequential(column, torch.nn.Tanh(), RowParallelLinear(12, 8, mesh, bias=bias, **F64))

    def check(rank: int) -> None:
        mesh = build_mesh(tp=tp)
        for bias in (False, True):
            check_layer(
                mesh,
                lambda mesh, bias=bias: two(mesh, bias),  # type: ignore[misc]
                lambda w, x: F.linear(
                    torch.tanh(F.linear(x, w["0.weight"], w.get("0.bias"))), w["2.weight"], w.get("2.bias")
                ),
            )
        gathered = functools.partial(ColumnParallelLinear, 8, 12, gather_output=True, **F64)
        check_layer(mesh, gathered, lambda w, x: F.linear(x, w["weight"]))
        check_embedding(mesh)
        for vocab in (8, 5, 3):  # full; padded; a rank of padding only
            check_cross_entropy(mesh, vocab)
        check_half_precision(mesh)

    run_ranks(tp, check)


def test_no_rank_holds_a_row_of_all_logits(run_ranks: RunRanks) -> None:
    wide = dataclasses.replace(BASE, vocab_multiple=256)

    def widest(rank: int) -> int:
        seen: list[int] = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                for tensor in out if isinstance(out, (tuple, list)) else (out,):
                    if isinstance(tensor, torch.Tensor) and tensor.dim() >= 2:
                        seen.append(tensor.shape[-1] if tensor.dim() == 3 else 0)
                return out

        model = LlamaModel(wide, build_mesh(tp=4))
        with Watch():
            model.loss_sum(make_steps()[0][1]).backward()
        return max(seen)

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
