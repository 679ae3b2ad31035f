"""A configuration is a run: made twice it is the same, and no interruption or change of layout shows in its losses."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from energon_lite.trainer import TrainerConfig
from tests.testing import nightly_but
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.small_runs import BATCHING, make_config, metrics, train


def run_config(path: Path, output: Path, mesh: dict[str, Any], *, packed: bool = False, **train: Any) -> TrainerConfig:
    config = make_config(path, output, mesh=mesh, **train)
    model = dataclasses.replace(config.model, num_layers=4, dtype="float64")
    data = dataclasses.replace(config.data, batching=BATCHING["best_fit"] if packed else None)
    return dataclasses.replace(config, model=model, data=data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "mesh", "packed"), nightly_but({1}, [(1, {}, False), (4, {"tp": 2, "pp": 2}, True)]), ids=str
)
def test_two_runs_of_one_configuration_write_the_same(
    run_ranks: RunRanks, measured: Path, tmp_path: Path, world: int, mesh: dict[str, Any], packed: bool
) -> None:
    """All but times, to the last bit, whatever number of workers loads."""
    found = []
    for name, workers in (("one", 0), ("two", 1)):
        config = run_config(measured, tmp_path / name, mesh, packed=packed, steps=5, save_every=2, eval_every=2)
        config = dataclasses.replace(
            config,
            data=dataclasses.replace(config.data, workers=workers),
            model=dataclasses.replace(config.model, dtype="float32"),
        )
        assert run_ranks(world, lambda rank, c=config: train(c)) == [5] * world
        found.append(metrics(tmp_path / name))
    assert found[0] == found[1] and len(found[0]) == 5
    assert "eval_loss" in found[0][1]


@pytest.mark.nightly
def test_torchrun_starts_a_killed_run_again_where_it_was(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    """``--max-restarts``: the trainer goes on from its newest checkpoint by itself, to the same bits."""
    common = {"steps": 5, "save_every": 2, "async_save": False}
    config = make_config(blend, tmp_path / "straight", mesh={"tp": 2}, **common)
    assert run_ranks(2, lambda rank: train(config)) == [5, 5]
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import dataclasses, os, signal, sys
            from tests.trainer.parallel.small_runs import Path, Trainer, make_config

            blend, output = map(Path, sys.argv[1:])
            settings = {"steps": 5, "save_every": 2, "async_save": False}
            with Trainer(make_config(blend, output, mesh={"tp": 2}, **settings)) as trainer:
                undisturbed = trainer.launch

                def step(number, batches):
                    if number == 4 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                        os.kill(os.getpid(), signal.SIGKILL)
                    return undisturbed(number, batches)

                trainer.launch = step
                assert trainer.run() == 5
                (output / f"restarts-{os.environ['RANK']}").write_text(os.environ["TORCHELASTIC_RESTART_COUNT"])
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [*command, str(program), str(blend), str(tmp_path / "restarted")],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / f"restarted/restarts-{rank}").read_text() for rank in range(2)] == ["1", "1"]
    assert metrics(tmp_path / "restarted") == metrics(tmp_path / "straight")
