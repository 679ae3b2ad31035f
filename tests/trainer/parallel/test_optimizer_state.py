"""The optimizer's state in torch's form: whole on each rank, and for any number of ranks."""

from __future__ import annotations

from typing import Any

import torch

from energon_lite.trainer import OptimizerConfig, OverlappedDistributedOptimizer, build_mesh
from tests.trainer.optimizer.test_as_torchs import backward, make_net
from tests.trainer.parallel.rank_processes import RunRanks


def test_the_state_of_two_ranks_is_that_of_one(run_ranks: RunRanks) -> None:
    config = OptimizerConfig(clip=0.5, bucket_size=30)

    def train(rank: int, world: int, state: Any, numbers: range) -> Any:
        net = make_net([5, 7, 3], torch.bfloat16)
        optimizer = OverlappedDistributedOptimizer(net, build_mesh(), config)
        if state is not None:
            net.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        for number in numbers:
            for part in range(2)[rank::world]:
                backward(net, 2 * number + part)
            optimizer.step(lr=0.01)
        return net.state_dict(), optimizer.state_dict()

    halves = run_ranks(2, lambda rank: train(rank, 2, None, range(3)))
    for (weights, state), kind in zip(halves, ("same", "on both"), strict=True):
        assert state["state"].keys() == halves[0][1]["state"].keys(), kind
        assert {"step", "exp_avg", "exp_avg_sq", "master"} == state["state"][0].keys()
        for number, tensors in state["state"].items():
            assert all(torch.equal(tensor, halves[0][1]["state"][number][name]) for name, tensor in tensors.items())
            assert tensors["master"].dtype == torch.float32
        assert all(torch.equal(value, halves[0][0][name]) for name, value in weights.items())
    onward = run_ranks(2, lambda rank: train(rank, 2, halves[0], range(3, 5)))[0]
    whole = run_ranks(2, lambda rank: train(rank, 2, None, range(5)))[0]
    alone = train(0, 1, halves[0], range(3, 5))
    for number, tensors in whole[1]["state"].items():
        for kind, tensor in tensors.items():
            assert torch.equal(tensor, onward[1]["state"][number][kind]), "nothing is rounded on the way"
            torch.testing.assert_close(tensor, alone[1]["state"][number][kind], rtol=2e-2, atol=2e-3)
