"""The training data set of a run, made without the run."""

from __future__ import annotations

from typing import Any

from energon_lite.trainer.data.loaders import RunData
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.training.config import TrainerConfig


def training_dataset(config: TrainerConfig) -> Any:
    """Return the training data set of a run, in one process without a process group: its plan is equal on any ranks.

    Example:
        >>> sample_history(training_dataset(load_config("run.yaml")), leaf=0, index=7)
    """
    data = RunData(config.data, config.model, ParallelMesh(), seed=config.seed, eval_batches=None)
    with data.train_loader as loader:
        return loader.dataset
