"""The cut layers and the loss against torch's whole ones: values, gradients, and what is refused."""

from __future__ import annotations

import dataclasses
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


def on_ranks(tp: int, check: Callable[[ParallelMesh], None]) -> Callable[[int], None]:
    return lambda rank: check(build_mesh(tp=tp))


def whole(module: torch.nn.Module, make: Callable[[ParallelMesh], torch.nn.Module]) -> dict[str, torch.Tensor]:
    """The uncut weights of a module: those that one process alone would have."""
    alone = make(ParallelMesh())
    initialize_parameters(alone, seed=3, mesh=ParallelMesh())
    return {name: p.detach().requires_grad_() for name, p in alone.named_parameters()}


def assert_gradients(module: torch.nn.Module, weights: dict[str, torch.Tensor], mesh: ParallelMesh) -> None:
    for name, p in module.named_parameters():
        full = weights[name].grad
        assert full is not None and p.grad is not None
        torch.testing.assert_close(p.grad, layout_of(p).local_part(full, mesh), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_column_then_row_is_two_linears(run_ranks: RunRanks, tp: int, bias: bool) -> None:
    def check(mesh: ParallelMesh) -> None:
        def make(mesh: ParallelMesh) -> torch.nn.ModuleDict:
            return torch.nn.ModuleDict(
                {
                    "column": ColumnParallelLinear(8, 12, mesh, bias=bias, **F64),
                    "row": RowParallelLinear(12, 8, mesh, bias=bias, **F64),
                }
            )

        module = make(mesh)
        initialize_parameters(module, seed=3, mesh=mesh)
        w = whole(module, make)
        x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
        out = module["row"](torch.tanh(module["column"](x)))
        expected = F.linear(
            torch.tanh(F.linear(y, w["column.weight"], w.get("column.bias"))), w["row.weight"], w.get("row.bias")
        )
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        out.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-12)
        assert_gradients(module, w, mesh)

    run_ranks(tp, on_ranks(tp, check))


def test_gathered_output_is_the_whole_one(run_ranks: RunRanks) -> None:
    def check(mesh: ParallelMesh) -> None:
        def make(mesh: ParallelMesh) -> ColumnParallelLinear:
            return ColumnParallelLinear(8, 12, mesh, gather_output=True, **F64)

        module = make(mesh)
        initialize_parameters(module, seed=3, mesh=mesh)
        w = whole(module, make)
        x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
        out, expected = module(x), F.linear(y, w["weight"])
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        out.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-12)
        assert_gradients(module, w, mesh)

    run_ranks(2, on_ranks(2, check))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_embedding_is_the_whole_table(run_ranks: RunRanks, tp: int) -> None:
    def check(mesh: ParallelMesh) -> None:
        def make(mesh: ParallelMesh) -> VocabParallelEmbedding:
            return VocabParallelEmbedding(8, 6, mesh, **F64)

        module = make(mesh)
        initialize_parameters(module, seed=3, mesh=mesh)
        w = whole(module, make)
        tokens = torch.tensor([[0, 7, 3], [3, 3, 5]])
        out, expected = module(tokens), F.embedding(tokens, w["weight"])
        assert torch.equal(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
        assert_gradients(module, w, mesh)

    run_ranks(tp, on_ranks(tp, check))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("vocab", [8, 5, 3], ids=["full", "padded", "a rank of padding only"])
def test_cross_entropy_is_torchs_over_the_real_vocabulary(run_ranks: RunRanks, tp: int, vocab: int) -> None:
    def check(mesh: ParallelMesh) -> None:
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

    run_ranks(tp, on_ranks(tp, check))


def test_cross_entropy_of_half_precision_logits_is_float32(run_ranks: RunRanks) -> None:
    def check(mesh: ParallelMesh) -> None:
        logits = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
        loss = vocab_parallel_cross_entropy(logits, torch.tensor([0, 3]), mesh)
        loss.sum().backward()
        assert loss.dtype == torch.float32 and logits.grad is not None and logits.grad.dtype == torch.bfloat16
        torch.testing.assert_close(loss, torch.full((2,), 8.0).log())

    run_ranks(2, on_ranks(2, check))


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
