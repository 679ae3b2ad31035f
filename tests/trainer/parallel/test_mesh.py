"""Ranks on a grid: who is whose peer, and which sizes fit."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from energon_lite.errors import TopologyError
from energon_lite.loading.iterators.collectives import device_of
from energon_lite.trainer.parallel.mesh import build_mesh, start_process_group
from energon_lite.trainer.parallel.rank_grid import AXES, RankGrid, fit_sizes
from tests.trainer.parallel.rank_processes import GROUP_LIMIT, RankFailure, RunRanks


def test_tensor_parallel_peers_are_neighbours_and_data_parallel_ones_have_other_tokens(run_ranks: RunRanks) -> None:
    def look(rank: int) -> tuple[dict[str, list[int]], float, list[bool]]:
        mesh = build_mesh(tp=2)
        groups = {axis: mesh.group(axis) for axis in ("pp", "dp", "cp", "tp")}
        peers = {axis: dist.get_process_group_ranks(group) for axis, group in groups.items() if group is not None}
        total = mesh.sum_over_data(torch.tensor(10.0**rank)).item()
        return peers, total, [mesh.any_rank(rank == 1), mesh.any_rank(False)]

    assert run_ranks(4, look) == [
        ({"dp": [0, 2], "tp": [0, 1]}, 101.0, [True, False]),
        ({"dp": [1, 3], "tp": [0, 1]}, 1010.0, [True, False]),
        ({"dp": [0, 2], "tp": [2, 3]}, 101.0, [True, False]),
        ({"dp": [1, 3], "tp": [2, 3]}, 1010.0, [True, False]),
    ]


def test_one_process_needs_no_group(run_ranks: RunRanks) -> None:
    def alone(rank: int) -> tuple[object, ...]:
        mesh = build_mesh()
        return dist.is_initialized(), mesh.world_size, mesh.is_main, mesh.rank("tp"), mesh.group("dp")

    assert run_ranks(1, alone) == [(False, 1, True, 0, None)]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 3}, "tp can be 1, 2, 4, 8"),
        ({"dp": 3, "tp": 2}, "dp can be 4; or"),
        ({"dp": 3, "tp": 3}, "use sizes whose product divides the world size"),
        ({"tp": 16}, "pp=1, cp=1, tp=16 do not fill a world of 8 ranks"),
        ({"tp": 0}, "tp=0 is not a number of ranks"),
        ({"pp": 3}, "pp can be 1, 2, 4, 8; or"),
        ({"cp": 3, "tp": 2}, "cp can be 1, 2, 4; or"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        fit_sizes(8, **sizes)


@pytest.mark.parametrize(("world", "sizes", "dp"), [(1, {}, 1), (8, {"tp": 2}, 4), (8, {"tp": 4, "dp": 2}, 2)])
def test_data_parallelism_takes_what_is_left(world: int, sizes: dict[str, int], dp: int) -> None:
    assert fit_sizes(world, **sizes) == dp


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "tp-pp-cp-dp", "dp-tp-cp-pp"])
def test_groups_are_those_of_the_grid(run_ranks: RunRanks, order: str) -> None:
    """What torch makes of the sizes is what the arithmetic says, for all axes, the data group and the ends."""
    grid = RankGrid(pp=2, dp=2, cp=2, tp=1, order=order)

    def groups(rank: int) -> dict[str, list[int]]:
        mesh = build_mesh(pp=2, cp=2, order=order)
        assert {axis: mesh.rank(axis) for axis in AXES} == grid.coordinates(rank)
        assert mesh.stage_rank(mesh.rank("pp")) == rank and mesh.stage_rank(mesh.rank("pp") + 2) == rank
        found = {axis: mesh.group(axis) for axis in (*AXES, "ends")} | {"data": mesh.data_group}
        return {name: dist.get_process_group_ranks(group) for name, group in found.items() if group is not None}

    results = run_ranks(8, groups)
    wanted = {axis: grid.groups(axis) for axis in ("pp", "dp", "cp")}
    wanted |= {"ends": grid.end_groups(), "data": grid.groups("dp", "cp")}
    for rank, found in enumerate(results):
        assert found == {name: next(ranks for ranks in groups if rank in ranks) for name, groups in wanted.items()}


def test_only_the_first_and_the_last_stage_are_ends(run_ranks: RunRanks) -> None:
    def ends(rank: int) -> list[int] | None:
        group = build_mesh(pp=3).group("ends")
        return None if group is None else dist.get_process_group_ranks(group)

    assert run_ranks(3, ends) == [[0, 2], None, [0, 2]]


def test_chunks_need_a_pipeline() -> None:
    with pytest.raises(TopologyError, match="virtual=2 chunks for each of 1 pipeline stages"):
        build_mesh(virtual=2)


def test_all_ranks_refuse_together(run_ranks: RunRanks) -> None:
    with pytest.raises(RankFailure, match="do not fill a world of 2 ranks") as failure:
        run_ranks(2, lambda rank: build_mesh(tp=3))
    assert failure.value.by_rank.keys() == {0, 1}


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="its gloo keeps the time that a group was made with")
@pytest.mark.parametrize("axis", ["tp", "dp", "everyone"])
def test_nobody_waits_for_a_peer_for_longer_than_he_was_told(run_ranks: RunRanks, axis: str) -> None:
    def wait(rank: int) -> float:
        mesh = build_mesh(tp=2, timeout=1.0)
        if rank:
            return 0.0  # alive, and silent
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.zeros(1), group=mesh.group(axis) if axis != "everyone" else None)
        return time.monotonic() - began

    assert run_ranks(4, wait)[0] < GROUP_LIMIT / 2, "the group was made with all of it"


def test_a_rank_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(TopologyError, match="rank 2 of this machine has no GPU: there are 2") as caught:
        build_mesh()
    assert "--nproc-per-node" in str(caught.value) and "CUDA_VISIBLE_DEVICES=" in str(caught.value)


@pytest.mark.parametrize(
    ("backends", "device"),
    [("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cuda"), ("cpu:gloo,cuda:gloo", "cpu"), ("cpu:gloo", "cpu")],
)
def test_the_device_is_the_one_the_group_talks_over(
    monkeypatch: pytest.MonkeyPatch, backends: str, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: backends)
    found, started = start_process_group()
    assert (found.type, started) == (device, False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert device_of(None).type == ("cuda" if backends == "cuda:nccl" else "cpu")
