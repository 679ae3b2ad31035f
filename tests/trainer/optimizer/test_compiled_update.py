"""Clip, AdamW and the rounded values in one kernel: the same numbers, and what is read and written for them."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from energon_lite.trainer.optimizer.buckets import sum_of_squares
from energon_lite.trainer.optimizer.config import OptimizerConfig, ParameterGroup
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import build_mesh

F32, F64 = torch.float32, torch.float64
CONFIG = OptimizerConfig(bucket_size=1700, clip=2.0, groups=(ParameterGroup("2.*", lr_scale=0.5),))


def run(dtype: torch.dtype, compiled: bool) -> tuple[list[float], dict[str, torch.Tensor], set[str]]:
    """Norms; state; and the operations of the last update that touch a slice of a bucket. The third step is NaN."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 20)).to(dtype)
    settings = OptimizerConfig(**{**vars(CONFIG), "compile": compiled})
    optimizer = OverlappedDistributedOptimizer(net, build_mesh(), settings)
    norms = []
    for number in range(6):
        factor = math.nan if number == 2 else 1.0
        (net(torch.ones(3, 30, dtype=dtype) * (number + 1)).square().sum() * factor).backward()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            norms.append(optimizer.step(lr=0.01))
    touching = {
        event.name
        for event in profiler.events() or ()
        if any(shape and math.prod(shape) >= 1000 for shape in event.input_shapes) or "adamw" in event.name
    }
    state = {f"{shard.name} {kind}": t.clone() for shard in optimizer.shards() for kind, t in shard.tensors.items()}
    state |= {name: p.detach().clone() for name, p in net.named_parameters()}
    return norms, state, touching


VIEWS = {"aten::slice", "aten::as_strided", "aten::view", "aten::to", "aten::detach"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.nightly) for dtype in (F32, F64))], ids=str
)
def test_one_kernel_makes_the_same_numbers(dtype: torch.dtype) -> None:
    from torch._inductor import metrics

    norms, state, touching = run(dtype, compiled=False)
    assert {"aten::mul_", "aten::_fused_adamw_"} <= touching
    assert ("aten::copy_" in touching) == (dtype == torch.bfloat16)
    metrics.reset()
    torch._dynamo.reset()
    compiled_norms, compiled_state, touching = run(dtype, compiled=True)
    assert metrics.generated_kernel_count == 1, "one kernel, whatever the size of a slice"
    reading = {name for name in touching if name.startswith("aten::")} - VIEWS
    assert reading <= {"aten::_foreach_norm", "aten::linalg_vector_norm"}, "nothing else passes over a slice"
    close = 1e-14 if dtype == torch.float64 else 1e-6
    assert math.isnan(norms[2]) and math.isnan(compiled_norms[2])
    assert compiled_norms == pytest.approx(norms, rel=close if dtype != torch.bfloat16 else 1e-2, nan_ok=True)
    for name, value in state.items():
        allowed = 1e-2 if dtype == torch.bfloat16 else close
        torch.testing.assert_close(compiled_state[name], value, rtol=allowed, atol=allowed)


def test_a_norm_is_read_without_copies() -> None:
    grads = [torch.randn(5000, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        found = sum_of_squares([*grads, grads[0].double()], torch.device("cpu"))
    touching = [e.name for e in profiler.events() or () if [5000] in e.input_shapes]
    assert touching.count("aten::copy_") == 1, "the one made here"
    assert touching.count("aten::linalg_vector_norm") == 4
    exact = sum(float(grad.double().square().sum()) for grad in [*grads, grads[0]])
    assert float(found) == pytest.approx(exact, rel=1e-6)
    assert float(sum_of_squares([], torch.device("cpu"))) == 0.0
