"""Ranks on a grid: who is whose peer, and which sizes fit, by arithmetic and in groups; a rank that is done leaves."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import TopologyError
from energon_lite.loading.iterators.collectives import device_of
from energon_lite.trainer.parallel.mesh import build_mesh, end_process_group, start_process_group
from energon_lite.trainer.parallel.rank_grid import AXES, RankGrid, fit_sizes, layers_of_stages
from energon_lite.trainer.training.process import Requests
from tests.trainer.parallel.rank_processes import GROUP_LIMIT, RankFailure, RunRanks
from tests.trainer.parallel.rank_processes import run_ranks as run_without_group


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


@pytest.mark.parametrize(
    "grid",
    [
        RankGrid(dp=2, tp=2),
        RankGrid(pp=3),
        *(RankGrid(pp=2, dp=2, cp=2, order=order) for order in ("tp-cp-dp-pp", "tp-pp-cp-dp", "dp-tp-cp-pp")),
    ],
    ids=str,
)
def test_groups_are_those_of_the_grid(run_ranks: RunRanks, grid: RankGrid) -> None:
    """What torch makes of the sizes is what the arithmetic says, for all axes, the data group and the ends."""

    def groups(rank: int) -> tuple[dict[str, list[int]], float, list[bool]]:
        mesh = build_mesh(pp=grid.pp, cp=grid.cp, tp=grid.tp, order=grid.order, sequence_parallel=True)
        assert mesh.sequence_cut == (grid.tp > 1)
        assert {axis: mesh.rank(axis) for axis in AXES} == grid.coordinates(rank)
        assert mesh.stage_rank(mesh.rank("pp")) == rank and mesh.stage_rank(mesh.rank("pp") + grid.pp) == rank
        found = {axis: mesh.group(axis) for axis in (*AXES, "ends")} | {"data": mesh.data_group}
        peers = {name: dist.get_process_group_ranks(group) for name, group in found.items() if group is not None}
        total = mesh.sum_over_data(torch.tensor(2.0**rank)).item()
        return peers, total, [mesh.any_rank(rank == 1), mesh.any_rank(False)]

    wanted = {axis: grid.groups(axis) for axis in AXES if grid.size(axis) > 1}
    wanted |= {"ends": grid.end_groups()} if grid.pp > 1 else {}
    wanted |= {"data": grid.groups("dp", "cp")} if grid.dp * grid.cp > 1 else {}
    for rank, (peers, total, flags) in enumerate(run_ranks(grid.world_size, groups)):
        own = {name: next((ranks for ranks in groups if rank in ranks), None) for name, groups in wanted.items()}
        assert peers == {name: ranks for name, ranks in own.items() if ranks is not None}
        assert total == sum(2.0**peer for peer in peers.get("data", [rank])) and flags == [True, False]


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


def test_ranks_agree_on_what_any_of_them_was_told(run_ranks: RunRanks) -> None:
    def told(rank: int) -> Any:
        asked = Requests(None, build_mesh())
        with asked.listening():
            os.kill(os.getpid(), (signal.SIGTERM, signal.SIGUSR2)[rank])
            return asked.agreed(rank == 1, sums=[rank + 1.0])

    assert run_ranks(2, told) == [("SIGTERM", True, [True], [3.0])] * 2


def test_ranks_of_torchrun_get_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **settings: begun.append(backend))
    for world_size, backends in (("1", []), ("2", ["gloo"])):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        assert start_process_group() == (torch.device("cpu"), world_size == "2") and begun == backends
        end_process_group()  # there is none


def test_each_group_of_a_program_meets_anew(tmp_path: Path) -> None:
    """In torchrun's store, which still has the addresses of the group before."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}

    def sums(rank: int) -> list[float]:
        os.environ.update(told, RANK=str(rank))
        dist.init_process_group("gloo")  # the caller's own
        dist.all_reduce(torch.ones(()))
        dist.destroy_process_group()
        found = []
        for sizes in ({"tp": 2}, {"pp": 2}, {}):
            time.sleep(0.2 * rank)  # the first rank looks for the second before that is there
            mesh = build_mesh(**sizes)
            groups = [*mesh.process_groups.values(), dist.new_group(backend="gloo")]
            for group in groups:
                dist.all_reduce(total := torch.ones(()), group=group)
                found.append(total.item())
            mesh.close()
        return found

    assert set(itertools.chain(*run_without_group(2, sums, 60.0, folder=tmp_path, group=False))) == {2.0}


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


# -- the end -----------------------------------------------------------------------------------------------------------

TRIALS = 2

# Late: gloo's threads get the processor only when nobody else wants it, and all share one. The interpreter ends slowly:
# while it sleeps in the middle of ending, they go on. With destroy_process_group alone, nearly every trial dies. On a
# busy machine they get it after many seconds, for which the limit of the wait must leave time.
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from energon_lite.trainer.parallel import mesh

mesh._LIMIT = 1000.0

class EndsSlowly:
    def __init__(self):
        self.sleep = time.sleep
    def __del__(self):
        self.sleep(0.2)

def be_late():
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm") as name:
            if "gloo" in name.read():
                os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))

torch.set_num_threads(1)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
room, trials = sys.argv[1], int(sys.argv[2])
died = 0
for trial in range(trials):
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            dist.init_process_group("gloo", init_method=f"file://{room}/{trial}", rank=rank, world_size=2)
            everyone, group = dist.group.WORLD, dist.new_group([0, 1])
            dist.all_reduce(torch.ones(1), group=group)
            be_late()
            dist.all_reduce(torch.ones(1), group=group)
            mesh.end_process_group()
            ends_slowly = EndsSlowly()
            sys.exit(0)
    died += sum(os.waitpid(rank, 0)[1] != 0 for rank in ranks)
print(died)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux' scheduling classes")
def test_an_interpreter_ends_well_after_late_threads(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(TRIALS)], capture_output=True, text=True, timeout=400
    )
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


# -- the grid as arithmetic --------------------------------------------------------------------------------------------

ORDERS = ["-".join(names) for names in itertools.permutations(AXES)]
grids = st.builds(RankGrid, *[st.integers(1, 4)] * 4, order=st.sampled_from(ORDERS))


def test_documented_grids() -> None:
    grid = RankGrid(pp=4, dp=2, cp=1, tp=2)
    assert grid.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]
    assert grid.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert grid.groups("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert grid.end_groups() == [[0, 12], [1, 13], [2, 14], [3, 15]]
    assert RankGrid(cp=4, tp=2).groups("cp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    # The layout of the loader's documentation: data parallel 2, pipeline parallel 2, tensor parallel 2.
    grid = RankGrid(pp=2, dp=2, tp=2, order="tp-pp-dp")
    places = [grid.coordinates(rank) for rank in range(8)]
    assert [place["dp"] for place in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [place["pp"] for place in places] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [place["tp"] for place in places] == [0, 1, 0, 1, 0, 1, 0, 1]


@given(grids, st.sets(st.sampled_from(AXES), min_size=1))
def test_groups_share_out_all_ranks_each_of_which_has_one_place(grid: RankGrid, axes: set[str]) -> None:
    groups = grid.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    for group in groups:
        places = [grid.coordinates(rank) for rank in group]
        assert [grid.rank_at(place) for place in places] == group
        for axis in AXES:
            seen = {place[axis] for place in places}
            assert seen == set(range(grid.size(axis))) if axis in axes else len(seen) == 1


@pytest.mark.parametrize("order", ["tp-cp-dp", "tp-cp-dp-ep", "tp-tp-cp-dp-pp", ""])
def test_an_order_names_each_axis_once(order: str) -> None:
    with pytest.raises(TopologyError, match="does not name each axis once"):
        RankGrid(2, 2, 2, 2, order)


def test_an_axis_of_one_may_be_left_out() -> None:
    assert RankGrid(pp=2, dp=2, tp=2, order="tp-pp-dp").slow_to_fast == ("cp", "dp", "pp", "tp")
    with pytest.raises(TopologyError, match="cp is missing"):
        RankGrid(cp=2, order="tp-dp-pp")


@given(st.integers(1, 64), st.data())
def test_advice_can_be_followed(world: int, data: st.DataObject) -> None:
    sizes = {axis: data.draw(st.integers(1, 8), label=axis) for axis in ("pp", "cp", "tp")}
    try:
        dp = fit_sizes(world, **sizes)
    except TopologyError as error:
        for part in (error.fix or "").split("; "):
            if " can be " in part:
                axis, _, numbers = part.partition(" can be ")
                for number in numbers.split(", "):
                    assert fit_sizes(world, **(sizes | {axis: int(number)})) >= 1
    else:
        assert dp * sizes["pp"] * sizes["cp"] * sizes["tp"] == world


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 3))
def test_each_layer_is_on_one_stage(layers: int, pp: int, virtual: int) -> None:
    if layers < pp * virtual:
        with pytest.raises(TopologyError, match="too few"):
            layers_of_stages(layers, pp, virtual)
        return
    stages = layers_of_stages(layers, pp, virtual)
    runs = [stages[run % pp][run // pp] for run in range(pp * virtual)]
    assert [number for run in runs for number in run] == list(range(layers))
    lengths = [len(run) for run in runs]
    assert max(lengths) - min(lengths) <= 1
    if pp * virtual > 1:
        assert lengths[-1] == min(lengths), "the stage that makes the loss has not more layers than others"
