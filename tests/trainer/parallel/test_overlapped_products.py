"""The input's gradient of a tensor-parallel product, which is summed over ranks behind the weights' gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from energon_lite.trainer.models.tensor_parallel import ColumnParallelLinear, Projections
from energon_lite.trainer.parallel import collectives
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import Layout


class Noted(TorchDispatchMode):
    """Notes matrix products in the order in which they are called."""

    def __init__(self, seen: list[str]):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "bmm"):
            self.seen.append("product")
        return func(*args, **(kwargs or {}))


class Together(Projections):
    def layers(self) -> list[ColumnParallelLinear]:
        return list(self.children())  # type: ignore[arg-type]


class NotedWork:
    def __init__(self, work: Any, seen: list[str]):
        self.work, self.seen = work, seen

    def wait(self) -> None:
        self.seen.append("wait")
        self.work.wait()


def noted(seen: list[str], collective: Any, *args: Any, **settings: Any) -> NotedWork:
    seen.append("sum")
    return NotedWork(collective(*args, **settings), seen)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_weights_are_done_while_the_input_is_summed(run_ranks: RunRanks, sequence: bool, fused: bool) -> None:
    def check(rank: int) -> None:
        mesh = Layout(tp=2, sp=sequence).mesh()
        layers = [ColumnParallelLinear(6, n, mesh, dtype=torch.float64, bias=True) for n in (4, 8, 2)]
        generator = torch.Generator().manual_seed(rank)
        for p in (p for layer in layers for p in layer.parameters()):
            torch.nn.init.normal_(p, generator=generator)
        alike = torch.Generator().manual_seed(5 + (rank if sequence else 0))
        x = torch.randn(3, 4, 6, dtype=torch.float64, generator=alike).requires_grad_()

        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        together = Together(mesh, fused=fused)
        for number, layer in enumerate(layers):
            together.add_module(str(number), layer)

        def gradients(made: Any) -> list[torch.Tensor]:
            loss = sum((y.sin() * (i + 1)).sum() for i, y in enumerate(made))
            assert isinstance(loss, torch.Tensor)
            whole = weights if together.joined is None else [together.joined]
            of_x, *others = torch.autograd.grad(loss, [x, *whole, *biases])
            if together.joined is not None:
                others[:1] = others[0].split([len(weight) for weight in weights[::-1]])[::-1]
            return [of_x, *others]

        entered = layers[0].enter(x)
        expected = gradients([layer(entered, entered=True) for layer in layers])
        seen: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            for module, name in ((dist, "all_reduce"), (collectives, "reduce_scatter")):
                patch.setattr(module, name, partial(noted, seen, getattr(module, name)))
            if fused:
                together.joined = torch.cat(together.joinable()).detach().requires_grad_()
            made = together.project(x)
            with Noted(seen):
                found = gradients(made)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
        products = 1 if fused else 3
        assert seen == ["product"] * products + ["sum"] + ["product"] * products + ["wait"]

    run_ranks(2, check)
