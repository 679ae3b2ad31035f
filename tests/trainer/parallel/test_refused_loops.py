"""Loops that an optimizer would train wrongly without a word: other counts on other ranks, torch's own clipping."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from energon_lite.errors import UsageError
from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import build_mesh
from tests.trainer.parallel.awkward_net import make, make_steps
from tests.trainer.parallel.rank_processes import RunRanks


@pytest.mark.parametrize(("at", "fewer"), [(2, 1), (3, 0)])
def test_with_reduce_every_they_are_told_in_any_step(run_ranks: RunRanks, at: int, fewer: int) -> None:
    """A rank that has one more would reduce it together with what the others do next."""
    steps = make_steps(4, 4)

    def job(rank: int) -> tuple[str, int]:
        net, optimizer, _mesh = make(reduce="every")
        with pytest.raises(UsageError) as caught:
            for number, batches in enumerate(steps, 1):
                mine = batches[rank::2][: fewer if number == at and rank == 0 else 2]
                optimizer.begin_step(len(mine))
                for batch in mine:
                    net.loss_sum(batch).backward()
                    optimizer.end_micro_batch()
                optimizer.step(lr=0.0)
        return str(caught.value), number

    for text, number in run_ranks(2, job):
        assert number == at and f"{fewer} micro-batches on one data-parallel rank and 2 on" in text


CLIPS: dict[str, Callable[[torch.nn.Module], object]] = {
    "norm": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "norm without foreach": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
    "value": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "by hand": lambda model: [p.grad.norm() for p in model.parameters() if p.grad is not None],
}


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_that_are_not_there_are_not_clipped_in_silence(run_ranks: RunRanks, world: int) -> None:
    """Whoever asks for them is told; whoever does not, trains as ever."""
    steps = make_steps(4, 4)

    def norms(rank: int, reduce: str, promised: bool, clip: Callable[[torch.nn.Module], object] | None) -> list[float]:
        net, optimizer, _mesh = make(reduce=reduce)
        found = []
        for batches in steps:
            mine = batches[rank::world]
            if promised:
                optimizer.begin_step(len(mine))
            for batch in mine:
                net.loss_sum(batch).backward()
                if promised:
                    optimizer.end_micro_batch()
            if clip is not None:
                with pytest.raises(UsageError, match=r"step\(\) returns the norm") as caught:
                    clip(net)
                assert "OptimizerConfig(clip=" in str(caught.value)
            found.append(optimizer.step(lr=1e-2))
            assert all(p.grad is None for p in net.parameters())
        return found

    def job(rank: int) -> None:
        for reduce, promised in itertools.product(["last", "every"], [True, False]):
            silent = norms(rank, reduce, promised, None)
            for name, clip in CLIPS.items():
                assert norms(rank, reduce, promised, clip) == silent, (reduce, promised, name)

    run_ranks(world, job)


def test_the_advice_clips() -> None:
    """Of a model in 16 bits."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).to(torch.bfloat16)
    theirs = {name: torch.nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    config = OptimizerConfig(clip=0.1)
    optimizer = OverlappedDistributedOptimizer(model, build_mesh(), config)
    for name, grad in zip(theirs, torch.autograd.grad(model(x).sum(), list(model.parameters())), strict=True):
        theirs[name].grad = 2 * grad.float()
    for _ in range(2):
        model(x).sum().backward()
    with pytest.raises(UsageError, match=r"OptimizerConfig\(clip="):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert optimizer.step(lr=1e-3) == pytest.approx(
        float(torch.nn.utils.clip_grad_norm_(theirs.values(), 0.1)), rel=1e-2
    )
