"""Sink for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from energon_lite.errors import UsageError

__all__ = ["TensorBoardFolder"]


class TensorBoardFolder:
    """Numbers for TensorBoard. A resumed run continues after the step it resumed from.

    Args:
        path: the folder; created if missing.
        after: the last step that counts; TensorBoard discards later ones. None: it keeps all.

    Raises:
        UsageError: tensorboard is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], *, after: int | None = None):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            fix = "pip install tensorboard, or leave it out (of a trainer: train.tensorboard=false)"
            raise UsageError("tensorboard is not installed", fix=fix) from None
        self._writer = SummaryWriter(os.fspath(path), purge_step=None if after is None else after + 1 if after else 0)

    def write(self, values: Mapping[str, Any]) -> None:
        """Append numbers; other values are skipped."""
        for name, value in values.items():
            if name not in ("step", "time") and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, values["step"])

    def close(self) -> None:
        self._writer.close()
