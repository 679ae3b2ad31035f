"""Sink for Weights & Biases."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from energon_lite.errors import UsageError

__all__ = ["WandbRun"]


class WandbRun:
    """Numbers for Weights & Biases. A resumed run continues there; of a repeated step, the first numbers are kept.

    Args:
        folder: folder of wandb's files; the run's id, for resuming, is in ``wandb-id`` in it.
        settings: arguments of ``wandb.init``, for example ``{project: captions, mode: offline}``.
        config: configuration of the run, as shown there.

    Raises:
        UsageError: wandb is not installed.
    """

    def __init__(
        self, folder: str | os.PathLike[str], settings: Mapping[str, Any], config: Mapping[str, Any] | None = None
    ):
        try:
            import wandb
        except ImportError:
            fix = "pip install 'energon-lite[wandb]', or leave it out (of a trainer: train.wandb)"
            raise UsageError("wandb is not installed", fix=fix) from None
        name = Path(folder, "wandb-id")
        if not name.exists():
            name.parent.mkdir(parents=True, exist_ok=True)
            name.write_text(uuid.uuid4().hex[:8])
        given = {"id": name.read_text(), "resume": "allow", "dir": os.fspath(folder), **settings}
        self._run = wandb.init(config=dict(config or {}), **given)

    def write(self, values: Mapping[str, Any]) -> None:
        self._run.log({name: value for name, value in values.items() if name != "step"}, step=values["step"])

    def close(self) -> None:
        self._run.finish()
