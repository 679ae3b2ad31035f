"""The collectives of a step, group by group: how many there are, and that none waits behind the gathers of values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel import collectives
from energon_lite.trainer.training.config import OptimizerConfig
from energon_lite.trainer.training.guards import SpikeGuard
from energon_lite.trainer.training.step import launch_step
from tests.testing import nightly_but
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import BASE, EVERY, LAST, Layout, make_steps, own

#: Collectives, by the module in which the trainer finds them.
CALLS = (
    (dist, ("all_reduce", "broadcast", "all_gather", "isend", "recv", "all_gather_object", "broadcast_object_list")),
    (collectives, ("reduce_scatter", "all_gather")),
)
Logs = dict[str, list[str]]


@contextmanager
def noted(names: dict[Any, str]) -> Iterator[Logs]:
    """The collectives within the block in their order, for each group by its name."""
    logs: Logs = {}

    def note(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **how: Any) -> Any:
            logs.setdefault(names.get(how.get("group"), "?"), []).append(name)
            return call(*args, **how)

        return launch

    with pytest.MonkeyPatch.context() as patch:
        for owner, calls in CALLS:
            for name in calls:
                patch.setattr(owner, name, note(name, getattr(owner, name)))
        yield logs


def logs_of_steps(layout: Layout, settings: OptimizerConfig, *, apart: bool = True) -> tuple[Logs, int]:
    """Those of two steps behind the first, and the number of buckets; without ``apart``, all in the optimizer's group.

    A step with a guard of spikes, so that all that a step may send is sent.
    """
    mesh = layout.mesh()
    if not apart:
        data = mesh.data_group
        assert data is not None
        mesh = dataclasses.replace(mesh, process_groups={**mesh.process_groups, "numbers": data})
    model = LlamaModel(BASE, mesh, seed=5)
    optimizer = OverlappedDistributedOptimizer(model, mesh, settings)
    spikes = SpikeGuard(9.0, 4, mesh)
    names = {None: "world"} | {group: name for name, group in mesh.process_groups.items()}
    names[mesh.data_group] = "optimizer"
    steps = [own(step, mesh) for step in make_steps(("text", "packed", "mixed", "packed image"))[:3]]
    launch_step(model, optimizer, steps[0], mesh, lr=1e-3, spikes=spikes)
    with noted(names) as logs:
        for step in steps[1:]:
            launch_step(model, optimizer, step, mesh, lr=1e-3, spikes=spikes)
    return logs, len(optimizer._queue)


LAYOUTS = (Layout(dp=2), Layout(dp=2, tp=2, sp=True), Layout(dp=2, cp=2), Layout(dp=2, pp=2, virtual=2))


@pytest.mark.parametrize("settings", [LAST, EVERY], ids=lambda settings: settings.reduce)
@pytest.mark.parametrize("layout", nightly_but({0, 3}, LAYOUTS), ids=str)
def test_none_stands_behind_a_gather(run_ranks: RunRanks, layout: Layout, settings: OptimizerConfig) -> None:
    """A communicator serves one collective after the other; a count there would wait until all values have come.

    In the optimizer's group there are reductions, then gathers, for each step; nothing that the forward pass waits for.
    """
    for logs, buckets in run_ranks(layout.world, lambda rank: logs_of_steps(layout, settings)):
        rounds = 4 // layout.dp if settings.reduce == "every" else 1
        assert logs["optimizer"] == 2 * (["reduce_scatter"] * buckets * rounds + ["all_gather"] * buckets)
        # Of each step, the number of tokens and the sums of losses; for ``every``, the number of micro-batches too.
        assert logs["numbers"] == ["all_reduce"] * (6 if settings.reduce == "every" else 4)
        assert logs["world"] == ["all_reduce"] * 4, "of each step, the guard's judgement and the norm"
        others = {name: log for name, log in logs.items() if name not in ("optimizer", "numbers", "world")}
        axes = {"tp", "cp", "pp", "ends"} | {name for name in others if name.startswith(("up", "down"))}
        assert others.keys() <= axes, "a group of its own for each axis: no gather of values is there"
        assert len(others) == 0 or layout.world > 2


def test_a_count_in_the_group_of_the_optimizer_would_be_seen(run_ranks: RunRanks) -> None:
    for logs, buckets in run_ranks(2, lambda rank: logs_of_steps(Layout(dp=2), LAST, apart=False)):
        first, second = (logs["optimizer"][at : at + 2 * buckets + 2] for at in (0, 2 * buckets + 2))
        assert first[-buckets:] == ["all_gather"] * buckets and second[0] == "all_reduce", "behind the gathers"
