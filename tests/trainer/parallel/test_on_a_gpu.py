"""What only a GPU can show of the trainer: the numbers are those of the CPU, saving takes no memory of the GPU, its
kernels for packed rows, and that nobody waits for it."""

from __future__ import annotations

import dataclasses
import signal
import time
from typing import Any

import pytest
import torch

from energon_lite.trainer import (
    LlamaModel,
    MultimodalBatch,
    OptimizerConfig,
    OverlappedDistributedOptimizer,
    Trainer,
    build_mesh,
)
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.interface import document_lengths
from energon_lite.trainer.models.named_layers import (
    Run,
    choose_attention,
    dense_mask,
    has_varlen_kernel,
    packed_bounds,
    sdpa,
    varlen,
)
from energon_lite.trainer.models.sequence import lengths_of_rows
from energon_lite.trainer.training.step import LaunchedStep, launch_step
from tests.trainer.parallel.small_runs import SmallRuns, send, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; pytest -m gpu")]
GPU = torch.device("cuda")


@pytest.mark.parametrize("async_save", [False, True])
def test_a_run_and_its_resumption_follow_the_curve_of_the_cpu(
    runs: SmallRuns, async_save: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as hidden:
        hidden.setattr(torch.cuda, "is_available", lambda: False)
        train(runs.config("cpu", steps=8, deterministic=False))
    allocated: list[int] = []

    def look_and_stop(trainer: Trainer, step: int) -> None:
        assert trainer.mesh.device.type == "cuda"
        trainer.optimizer.wait_parameters()
        allocated.append(torch.cuda.memory_allocated())
        send(signal.SIGTERM, to_rank=0, at=5)(trainer, step)

    guard = {"spike_factor": 9.0, "spike_window": 4}  # it leaves out nothing, and is there
    on_gpu = runs.config("gpu", steps=8, save_every=3, async_save=async_save, **guard)
    stopped = train(on_gpu, look_and_stop)
    assert 5 <= stopped < 8 and train(on_gpu) == 8
    on_cpu, found = ([line["loss"] for line in runs.metrics(name)] for name in ("cpu", "gpu"))
    assert found == pytest.approx(on_cpu, rel=1e-4)
    assert allocated[4] <= 1.05 * allocated[2], "the checkpoint after the third step is kept on the GPU"


@pytest.mark.parametrize("start", [0, 512])
def test_one_kernel_for_all_documents_is_the_dense_mask(start: int) -> None:
    if not has_varlen_kernel(GPU, torch.bfloat16):
        pytest.skip("torch has no varlen_attn here")
    length = 1024
    documents = (torch.rand(2, start + length, device=GPU) < 0.01).long().cumsum(1)
    given = [
        torch.randn(2, heads, n, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        for heads, n in ((8, length), (2, start + length), (2, start + length))
    ]
    made = []
    lengths = lengths_of_rows(document_lengths(documents.cpu()), 2)
    for function, make_mask in ((sdpa, dense_mask), (varlen, packed_bounds)):
        out = function(*given, Run(start, length, make_mask(lengths, start, length, GPU)))
        made.append([out, *torch.autograd.grad(out.float().sin().sum(), given)])
    for mine, other in zip(made[1], made[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=0.03, atol=0.03)


def test_auto_takes_that_kernel() -> None:
    config = ModelConfig(dtype="bfloat16", hidden_size=512, num_heads=8, num_kv_heads=2)
    if has_varlen_kernel(GPU, torch.bfloat16):
        assert choose_attention(config, GPU).function is varlen


def test_a_step_is_launched_before_it_is_done() -> None:
    a = torch.randn(8192, 8192, device=GPU)
    (a @ a).sum().item()
    began = time.perf_counter()
    for _ in range(20):
        a = (a @ a).clamp(-1, 1)
    tokens, others = a.abs().sum(dtype=torch.float64), torch.ones(4, device=GPU).double()
    launched = LaunchedStep(torch.stack([tokens, *others, tokens]), 1e-3)
    until_launched = time.perf_counter() - began
    launched.result()
    assert until_launched < 0.2 * (time.perf_counter() - began)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("more", [{}, {"sliding_window": 100}, {"qkv_bias": True, "loss_chunk": 256}], ids=str)
def test_no_step_waits_for_the_device(more: dict[str, Any], compile: bool) -> None:
    """Plain and packed rows; the first steps learn, compile and fill caches of the host."""
    shape: dict[str, Any] = {"dtype": "bfloat16", "hidden_size": 512, "num_heads": 8, "num_kv_heads": 2, **more}
    config, mesh = ModelConfig(compile=compile, **shape), build_mesh()
    model = LlamaModel(config, mesh)
    optimizer = OverlappedDistributedOptimizer(model, mesh, OptimizerConfig())
    tokens = torch.randint(0, 200, (2, 513), generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(512) // 200).expand(2, -1)
    plain = MultimodalBatch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(2, 512)).to(GPU)
    packed = dataclasses.replace(plain, documents=documents.to(GPU), document_lengths=document_lengths(documents))
    for _ in range(3):
        launch_step(model, optimizer, [plain, packed], mesh, lr=1e-3).result()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = [launch_step(model, optimizer, [plain, packed], mesh, lr=1e-3) for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(step.result().loss > 0 for step in launched)
