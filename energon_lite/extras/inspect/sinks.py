"""Sinks of metrics: a file with lines of JSON, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.storage.files.atomic_file import write_bytes


class MetricsFile:
    """A file with a JSON object per line. A resumed run continues after the step it resumed from.

    Args:
        path: the file; created, with its folder, if missing.
        after: the last step that counts. Lines of later steps, which the run will repeat, and a line truncated by a
            crash are dropped. None: all lines are kept.

    Example:
        >>> with MetricsFile("output/metrics.jsonl", after=0) as metrics:
        ...     metrics.write({"step": 1, "loss": 5.5})
    """

    def __init__(self, path: str | os.PathLike[str], *, after: int | None = None):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if after is not None and path.exists():
            _drop_lines(path, after or -1)  # an evaluation before the first step is repeated, too
        self._stream = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def write(self, values: Mapping[str, Any]) -> None:
        """Append a line. Floats keep all their digits; NaN and infinity become null, as JSON has neither."""
        plain = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        self._stream.write(json.dumps(plain, allow_nan=False) + "\n")

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _drop_lines(path: Path, after: int) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    write_bytes(os.fspath(path), "".join(f"{line}\n" for line in lines if _step_of(line) <= after).encode())


def _step_of(line: str) -> float:
    try:
        step: float = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step


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
