"""A step that is launched, and the numbers that are read of it later."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from energon_lite.errors import UsageError
from energon_lite.trainer.models import attention_functions
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.interface import MultimodalBatch, document_lengths
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.training.step import launch_step, train_step
from tests.trainer.training.counted_operations import Operations
from tests.trainer.training.host_reads import host_reads

MODEL = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, ffn_size=24, vocab_size=29, vocab_multiple=1)


def text(rows: int = 2, length: int = 8, *, packed: bool = False, seed: int = 0) -> MultimodalBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, MODEL.vocab_size, (rows, length + 1), generator=generator)
    documents = (torch.rand(rows, length, generator=generator) < 0.3).long().cumsum(1) if packed else None
    masks = {"loss_mask": torch.ones(rows, length), "documents": documents}
    masks |= {"document_lengths": None if documents is None else document_lengths(documents)}
    return MultimodalBatch(tokens=tokens[:, :-1], labels=tokens[:, 1:], **masks)


def test_no_launch_reads_and_the_numbers_come_in_one() -> None:
    mesh = build_mesh()
    model = LlamaModel(dataclasses.replace(MODEL, loss_chunk=5, attention="sdpa"), mesh)
    optimizer = OverlappedDistributedOptimizer(model, mesh, OptimizerConfig())
    rates = iter([1e-3] * 9)

    def step(seed: int) -> list[str]:
        batches = [text(seed=seed), text(packed=True)]
        with host_reads() as found:
            launched.append(launch_step(model, optimizer, batches, mesh, lr=next(rates)))
        return found

    launched: list = []
    step(0)  # the first step learns the order of gradients
    assert step(1) == step(2) == []
    with host_reads() as found:
        result = launched[1].result()
    assert found == ["tolist"] and math.isfinite(result.loss) and result.tokens == 32
    assert [each.result().updates for each in launched] == [1, 2, 3]


def test_a_step_makes_no_tensor_of_numbers_of_the_host() -> None:
    """On a GPU, such a copy waits until all work before it is done."""
    mesh = build_mesh()
    model = LlamaModel(MODEL, mesh)
    optimizer = OverlappedDistributedOptimizer(model, mesh, OptimizerConfig())
    launch_step(model, optimizer, [text(), text()], mesh, lr=1e-3)  # the first step learns the order of gradients
    with Operations() as operations:
        launch_step(model, optimizer, [text(), text()], mesh, lr=1e-3)
    names = {name for name, _ in operations.found}
    assert "aten.mm.default" in names and "aten.lift_fresh.default" not in names


@pytest.mark.parametrize("attention", ["sdpa", "kernel"])
def test_documents_are_not_read_where_the_host_knows_their_lengths(
    monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    """Finding where they begin on the device would wait for all work before, in each micro-batch."""
    seen: list[tuple[int, int]] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *bounds: Any, **_: Any) -> torch.Tensor:
        seen.append(tuple(bounds[2:]))
        return q * v.sum()

    if attention == "kernel":
        monkeypatch.setattr(attention_functions, "_varlen_attn", lambda: kernel)
        monkeypatch.setattr(attention_functions, "has_varlen_kernel", lambda device, dtype: True)
    mesh = build_mesh()
    name = "varlen" if attention == "kernel" else attention
    model = LlamaModel(dataclasses.replace(MODEL, attention=name), mesh)
    optimizer = OverlappedDistributedOptimizer(model, mesh, OptimizerConfig())
    batch = text(packed=True)
    launch_step(model, optimizer, [batch], mesh, lr=1e-3)  # the first step learns the order of gradients
    with host_reads() as found, Operations() as operations:
        launch_step(model, optimizer, [batch], mesh, lr=1e-3)
    assert found == [] and "aten.nonzero.default" not in {name for name, _ in operations.found}
    if attention == "kernel":
        longest = max(batch.document_lengths or ())
        assert set(seen) == {(longest, longest)} and longest < 8, "not the length of a row"


def test_the_mask_of_a_sliding_window_is_made_once() -> None:
    mesh = build_mesh()
    model = LlamaModel(dataclasses.replace(MODEL, sliding_window=3), mesh)
    made = []
    for _ in range(2):
        with Operations() as operations, torch.no_grad():
            model.all_logits(text(length=11).tokens)
        made.append(sum("tril" in name or "triu" in name for name, _ in operations.found))
    assert made[0] > 0 and made[1] == 0


def test_a_kernel_for_sliding_windows_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row of 32,768 tokens, the mask would take 1 GB."""
    seen: list[tuple[int, int]] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, window_size: Any, **__: Any) -> torch.Tensor:
        seen.append(window_size)
        return q * v.sum()

    monkeypatch.setattr(attention_functions, "_varlen_attn", lambda: kernel)
    monkeypatch.setattr(attention_functions, "has_varlen_kernel", lambda device, dtype: True)
    model = LlamaModel(dataclasses.replace(MODEL, sliding_window=3), build_mesh())
    with Operations() as operations, torch.no_grad():
        model.all_logits(text(length=13).tokens)
    assert [name for name, _ in operations.found if "tril" in name or "triu" in name] == []
    assert seen == [(2, 0)] * MODEL.num_layers


def test_keys_and_values_are_joined_only_to_be_gathered() -> None:
    """Without context parallelism and cache, joining them and cutting them apart would be a copy of both."""
    model = LlamaModel(MODEL, build_mesh())
    with Operations() as operations, torch.no_grad():
        model.all_logits(text().tokens)
    width = 2 * MODEL.head_width
    joined = [shape for name, shape in operations.found if "cat" in name and shape[-1:] == (width,)]
    assert joined == [], "rotations are as wide as a head"


def test_a_count_of_the_loader_that_is_wrong_is_noticed_without_a_wait() -> None:
    """The weights that the loss used are summed on the device, and compared when the numbers are read anyway."""
    mesh = build_mesh()
    model = LlamaModel(MODEL, mesh)
    optimizer = OverlappedDistributedOptimizer(model, mesh, OptimizerConfig())
    right = dataclasses.replace(text(), counted=16.0)
    assert train_step(model, optimizer, [right], mesh, lr=1e-3).tokens == 16
    with host_reads() as found:
        launched = launch_step(model, optimizer, [dataclasses.replace(right, counted=15.0)], mesh, lr=1e-3)
    assert found == []
    with pytest.raises(UsageError, match="16 terms, its micro-batches 15 loss_tokens"):
        launched.result()


def test_a_rate_by_tokens_reads_their_number_only() -> None:
    mesh = build_mesh()
    model = LlamaModel(MODEL, mesh)
    optimizer = OverlappedDistributedOptimizer(model, mesh, OptimizerConfig())
    seen: list[int] = []
    batches = [text(), text(rows=0)]

    def rate(tokens: int) -> float:
        seen.append(tokens)
        return 1e-3

    launch_step(model, optimizer, batches, mesh, lr=rate)
    with host_reads() as found:
        launch_step(model, optimizer, batches, mesh, lr=rate)
    assert seen == [16, 16] and found == ["tolist"]


def test_what_is_read_late_is_what_was_read_at_once() -> None:
    """The third step is not finite: it is left out, and the count says so for it and not for the one before."""

    def run(late: bool) -> tuple[list[object], list[int], list[torch.Tensor]]:
        mesh = build_mesh()
        model = LlamaModel(MODEL, mesh)
        optimizer = OverlappedDistributedOptimizer(model, mesh, OptimizerConfig(clip=0.1))
        launched, results = [], []
        for number in range(5):
            batch = text(seed=number)
            spoiled = model.layers["0"].mlp.up_proj.weight.register_hook(lambda grad, n=number: grad / (n != 2))
            if late:
                launched.append(launch_step(model, optimizer, [batch], mesh, lr=1e-2))
            else:
                results.append(train_step(model, optimizer, [batch], mesh, lr=1e-2))
            spoiled.remove()
        optimizer.wait_parameters()
        results += [each.result() for each in launched]
        return [repr(each) for each in results], [each.result().updates for each in launched], [*model.parameters()]

    at_once, _, weights = run(late=False)
    late, updates, same = run(late=True)
    assert late == at_once and updates == [1, 2, 2, 3, 4]
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))


def test_gradients_are_moved_into_buckets_together() -> None:
    """Not by a kernel for each parameter, and in each micro-batch."""
    mesh = build_mesh()
    model = LlamaModel(MODEL, mesh)
    optimizer = OverlappedDistributedOptimizer(model, mesh, OptimizerConfig())
    launch_step(model, optimizer, [text(), text()], mesh, lr=1e-3)  # the first step learns the order of gradients
    with Operations() as operations:
        launch_step(model, optimizer, [text(), text()], mesh, lr=1e-3)
    names = [name for name, _ in operations.found]
    assert names.count("aten._foreach_copy_.default") == names.count("aten._foreach_add_.List") == 1  # of one bucket
    shapes = {tuple(p.shape) for p in model.parameters()}
    one_by_one = [name for name, shape in operations.found if shape in shapes and name in SINGLE]
    assert one_by_one == []


#: Operations that would move or add one gradient.
SINGLE = ("aten.copy_.default", "aten.add_.Tensor")


@pytest.mark.parametrize("bias", [False, True])
def test_fused_weights_are_views_of_a_bucket(bias: bool) -> None:
    """No copy of them is made for each call, nor kept for the backward pass; and the numbers are the same."""
    mesh, runs = build_mesh(), []
    for fused in (False, True):
        model = LlamaModel(dataclasses.replace(MODEL, fuse_projections=fused, qkv_bias=bias), mesh)
        optimizer = OverlappedDistributedOptimizer(model, mesh, OptimizerConfig())
        steps = [train_step(model, optimizer, [text(seed=n), text(packed=True)], mesh, lr=1e-2) for n in range(3)]
        with Operations() as operations:
            launch_step(model, optimizer, [text(), text()], mesh, lr=1e-3)
        attention, feed = model.layers["0"].self_attn, model.layers["0"].mlp
        wide = {(48, 16), (2 * MODEL.ffn_size, 16)}
        cats = [shape for name, shape in operations.found if "cat" in name and shape in wide]
        products = sum(name in ("aten.mm.default", "aten.addmm.default") for name, _ in operations.found)
        assert cats == [] and (attention.joined is not None) == (feed.joined is not None) == fused
        runs.append((steps, [p.detach().clone() for p in model.parameters()], products))
        optimizer.close()
        assert attention.joined is None, "the model is whole without the optimizer"
    for one, other in zip(*(steps for steps, _, _ in runs), strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5) and one.grad_norm == pytest.approx(
            other.grad_norm, rel=1e-5
        )
    for one, other in zip(*(weights for _, weights, _ in runs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    layers, passes, micro_batches = MODEL.num_layers, 3, 2
    assert runs[0][2] - runs[1][2] == 3 * layers * passes * micro_batches, "five products are two"
