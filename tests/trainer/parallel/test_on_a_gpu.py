"""What only a GPU can show of the trainer: the numbers are those of the CPU, and saving takes no memory of the GPU."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from energon_lite.trainer import Trainer
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.small_runs import make_config, metrics, send, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; pytest -m gpu")]


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in metrics(output)]


@pytest.mark.parametrize("async_save", [False, True])
def test_a_run_and_its_resumption_follow_the_curve_of_the_cpu(
    run_ranks: RunRanks, blend: Path, tmp_path: Path, async_save: bool
) -> None:
    on_cpu = make_config(blend, tmp_path / "cpu", steps=8)
    run_ranks(1, lambda rank: train(on_cpu))  # a group of gloo's, and so on the CPU
    allocated: list[int] = []

    def look_and_stop(trainer: Trainer, step: int) -> None:
        assert trainer.mesh.device.type == "cuda"
        trainer.optimizer.wait_parameters()
        allocated.append(torch.cuda.memory_allocated())
        send(signal.SIGTERM, to_rank=0, at=5)(trainer, step)

    guard = {"spike_factor": 9.0, "spike_window": 4}  # it leaves out nothing, and is there
    on_gpu = make_config(blend, tmp_path / "gpu", steps=8, save_every=3, async_save=async_save, **guard)
    stopped = train(on_gpu, look_and_stop)
    assert 5 <= stopped < 8 and train(on_gpu) == 8
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-4)
    assert allocated[4] <= 1.05 * allocated[2], "the checkpoint after the third step is kept on the GPU"
