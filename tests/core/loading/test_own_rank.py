"""The rank of a process, told by torchrun, srun, mpirun, a group, or by hand: each sample goes to one of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from energon_lite import WorkerConfig
from energon_lite.errors import TopologyError, UsageError
from tests.fork_server import run_program, write_commands
from tests.testing import ALONE, take, train_loader
from tests.trainer.parallel.rank_processes import RankFailure, run_ranks

SAMPLES = 12
#: Variables of launchers other than torchrun: srun, Open MPI, MPICH and what is made of it, MVAPICH.
OTHERS = [
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
]

_SCRIPT = """
import sys
from energon_lite import WorkerConfig, get_savable_loader, get_val_dataset
config = WorkerConfig.default_worker_config(num_workers=0)
with get_savable_loader(get_val_dataset(sys.argv[1], batch_size=1, worker_config=config)) as loader:
    open(f"{sys.argv[2]}/{config.rank}", "w").write(" ".join(batch.__key__[0] for batch in loader))
"""


def keys(leaf: Path, config: WorkerConfig, count: int = SAMPLES // 2) -> list[str]:
    with train_loader(leaf, batch_size=1, worker_config=config) as loader:
        return [batch.__key__[0] for batch in take(loader, count)]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def launch(**variables: object) -> None:
        for name in (*("RANK", "WORLD_SIZE", "SLURM_PROCID"), *(size for _, size in OTHERS)):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return launch


@pytest.mark.slow
def test_torchrun_without_a_process_group(leaf_of: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    (tmp_path / "keys").mkdir()
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", str(script)]
    environment = os.environ | {"PYTHON_EXEC": str(write_commands(tmp_path / "commands") / "python")}
    run_program([*command, str(leaf_of(SAMPLES)), str(tmp_path / "keys")], check=True, timeout=120, env=environment)
    found = [(tmp_path / "keys" / str(rank)).read_text().split() for rank in range(2)]
    assert sorted(found[0] + found[1]) == sorted(f"a-{number}" for number in range(SAMPLES))


def test_what_launchers_tell(launched: Callable[..., None]) -> None:
    def place() -> tuple[int, int]:
        config = WorkerConfig.default_worker_config()
        return config.rank, config.world_size

    for alone in (
        {},
        {"RANK": 0, "WORLD_SIZE": 1},
        {"SLURM_PROCID": 0, "SLURM_NTASKS": 8},  # a notebook, or a batch script, of a job with eight tasks
        {"SLURM_PROCID": 0, "SLURM_NTASKS": 8, "SLURM_STEP_NUM_TASKS": 1},
    ):
        launched(**alone)
        assert place() == (0, 1)
    launched(RANK=3, WORLD_SIZE=4, SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2)  # torchrun on two machines, under srun
    assert place() == (3, 4)


@pytest.mark.parametrize(("rank", "size"), OTHERS)
def test_srun_and_mpirun_without_a_process_group(
    launched: Callable[..., None], leaf_of: Any, rank: str, size: str
) -> None:
    launched(**{rank: 1, size: 2})
    with pytest.raises(UsageError, match=f"(?s){size}=2.*init_process_group.*{rank}") as refused:
        WorkerConfig.default_worker_config()
    advised = refused.value.fix.split("or give ")[1].split("; or")[0]  # type: ignore[union-attr]
    mine = keys(leaf_of(SAMPLES), eval(advised))
    assert mine == keys(leaf_of(SAMPLES), WorkerConfig(rank=1, world_size=2))
    with pytest.raises(TopologyError, match="rank 0 of 2, and this process is rank 1 of 2"):
        keys(leaf_of(SAMPLES), WorkerConfig(rank=0, world_size=2))
    assert len(keys(leaf_of(SAMPLES), ALONE)) == SAMPLES // 2


@pytest.mark.parametrize("variables", [{"WORLD_SIZE": 2}, {"RANK": "x", "WORLD_SIZE": 2}, {"RANK": 2, "WORLD_SIZE": 2}])
def test_several_processes_without_a_number(launched: Callable[..., None], variables: dict[str, Any]) -> None:
    launched(**variables)
    with pytest.raises(UsageError, match=r"(?s)not a rank and a world size.*torchrun"):
        WorkerConfig.default_worker_config()


def test_the_same_rank_in_a_group(leaf_of: Any, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 0 of 2, and this process is rank 1 of 2"):
        run_ranks(2, lambda rank: keys(leaf_of(SAMPLES), WorkerConfig(rank=0, world_size=2)), folder=tmp_path)


def test_peers_that_share_batches_stay(leaf_of: Any, tmp_path: Path) -> None:
    """Tensor-parallel peers by hand; and all batches on each rank."""

    def job(rank: int) -> tuple[list[str], list[str], bool]:
        loader = train_loader(leaf_of(SAMPLES), rank=rank // 2, world_size=2, batch_size=1)
        shared = [batch.__key__[0] for batch in take(loader, 6)]
        saved = loader.save_state_global() is not None
        return shared, keys(leaf_of(SAMPLES), ALONE, SAMPLES), saved

    shared, every, saved = zip(*run_ranks(4, job, folder=tmp_path), strict=True)
    assert shared[0] == shared[1] and shared[2] == shared[3] and not set(shared[0]) & set(shared[2])
    assert every == (every[0],) * 4 and saved == (True, False, False, False)


def test_a_rank_that_no_process_has_is_found_when_states_meet(leaf_of: Any, tmp_path: Path) -> None:
    def job(rank: int) -> None:
        loader = train_loader(leaf_of(SAMPLES), rank=0, world_size=2, batch_size=1)
        take(loader, 1)
        with pytest.raises(TopologyError, match=r"no process is data-parallel rank 1 of 2; .* ranks 0, 0, 0, 0"):
            loader.save_state_global()

    run_ranks(4, job, folder=tmp_path)


def test_a_config_that_was_made_before_the_group(leaf_of: Any, tmp_path: Path) -> None:
    def job(rank: int) -> None:
        os.environ.pop("WORLD_SIZE", None)
        alone = WorkerConfig.default_worker_config(num_workers=0)
        store = dist.FileStore(str(tmp_path / "late"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        config = WorkerConfig.default_worker_config(num_workers=0)
        assert (config.rank, config.world_size) == (rank, 2)
        keys(leaf_of(SAMPLES), config)
        with pytest.raises(TopologyError, match=rf"(?s)rank 0 of 1, and this process is rank {rank} of 2.*after init"):
            keys(leaf_of(SAMPLES), alone)

    run_ranks(2, job, folder=tmp_path, group=False)
