"""Steps of a run at which the demo acts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from energon_lite.trainer import load_config
from examples.demo.errors import DemoError


@dataclass(frozen=True)
class Steps:
    """Steps of the demo.

    Args:
        total: of a whole run.
        resume: the last checkpoint before the end.
        kill: a rank is killed after this step, some steps after the checkpoint, so that steps are repeated.
    """

    total: int
    resume: int
    kill: int

    @classmethod
    def of(cls, config: Path) -> Steps:
        """Those that fit a configuration.

        Raises:
            DemoError: it makes, or keeps, too few checkpoints.
        """
        train = load_config(config).train
        every = max(1, train.save_every)
        resume = (train.steps - 1) // every * every
        kill = resume + every // 3
        if not 0 < resume < kill < resume + every <= train.steps:
            raise DemoError(
                f"{config} saves too seldom for this demo: set train.save_every to a quarter of train.steps"
            )
        # This checkpoint and those behind it; the one after the last step counts too.
        wanted = 1 + -(-(train.steps - resume) // every)
        if train.keep < wanted:
            raise DemoError(f"{config} does not keep the checkpoint of step {resume}: set train.keep to {wanted}")
        return cls(train.steps, resume, kill)

    @property
    def checkpoint(self) -> str:
        """The name of the checkpoint that runs go on from."""
        return f"step-{self.resume:08d}"
