"""The overlapped optimizer on modules that nobody here wrote makes the run of torch's AdamW in one process."""

from __future__ import annotations

import dataclasses

import pytest

from energon_lite.trainer.optimizer.config import ParameterGroup
from energon_lite.trainer.parallel.mesh import build_mesh
from tests.testing import nightly_but
from tests.trainer.parallel.foreign_nets import CONFIG, NETS, Found, make_net, serial, train, unlike
from tests.trainer.parallel.rank_processes import RunRanks

STEPS, MICRO_BATCHES = 4, 4
GROUPS = (ParameterGroup("*1*", weight_decay=0.3, lr_scale=0.5), ParameterGroup("*w*", lr_scale=2.0))


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("world", nightly_but({2}, [1, 2, 4]))
def test_run_is_that_of_torchs_adamw(run_ranks: RunRanks, world: int) -> None:
    last = dataclasses.replace(CONFIG, reduce="last", bucket_size=700)
    every = dataclasses.replace(CONFIG, reduce="every", bucket_size=100, groups=GROUPS)

    def job(rank: int) -> dict[str, list[Found]]:
        mesh = build_mesh()
        # Ranks begin with other weights, as a script without a seed does: the first rank's count.
        return {
            name: [train(make_net(name, seed=rank), mesh, STEPS, MICRO_BATCHES, config)[0] for config in (last, every)]
            for name in NETS
        }

    by_rank = run_ranks(world, job)
    for name in NETS:
        for number, config in enumerate((last, every)):
            wanted = serial(make_net(name), STEPS, MICRO_BATCHES, dataclasses.replace(config, reduce="last"))
            assert config is every or max(wanted[0]) > CONFIG.clip, "clipping was not tested"
            assert all(unlike(runs[name][number], wanted) <= 1e-9 for runs in by_rank), (name, config)
