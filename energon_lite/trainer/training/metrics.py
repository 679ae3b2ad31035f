"""What a run reports: one line of JSON per step in a file, and one line of progress for whoever looks."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from energon_lite.errors import UsageError

logger = logging.getLogger(__name__)


class MetricsFile:
    """One JSON object per line and step. A resumed run goes on after the step it resumed from.

    Args:
        path: the file; made, with its folder, if it is not there.
        after: the last step that counts. Lines of later steps, which the run is about to make again, and a line that a
            crash has cut, are dropped.

    Example:
        >>> with MetricsFile("output/metrics.jsonl", after=0) as metrics:
        ...     metrics.write({"step": 1, "loss": 5.5})
    """

    def __init__(self, path: str | os.PathLike[str], *, after: int):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _drop_lines(path, after)
        self._stream = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def write(self, values: Mapping[str, Any]) -> None:
        """Add a line. Floats keep all their digits; those that are not finite become null, as JSON has none."""
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


class TensorBoardFolder:
    """The same numbers for TensorBoard, which draws them. A resumed run goes on after the step it resumed from.

    Args:
        path: the folder; made if it is not there.
        after: the last step that counts; TensorBoard forgets later ones.

    Raises:
        UsageError: tensorboard is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], *, after: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            fix = "pip install tensorboard, or set train.tensorboard=false"
            raise UsageError("tensorboard is not installed", fix=fix) from None
        self._writer = SummaryWriter(os.fspath(path), purge_step=after + 1)

    def write(self, values: Mapping[str, Any]) -> None:
        """Add the numbers of a step."""
        for name, value in values.items():
            if name != "step":
                self._writer.add_scalar(name, value, values["step"])

    def close(self) -> None:
        self._writer.close()


def _drop_lines(path: Path, after: int) -> None:
    kept = [f"{line}\n" for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= after]
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.writelines(kept)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def _step_of(line: str) -> float:
    try:
        step: float = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step


class Progress:
    """A live line on a terminal; elsewhere, a logged line every so many steps.

    Args:
        total: steps of the run.
        done: steps that are done already.
        every: steps between logged lines.
        visible: False on the ranks that stay silent.
    """

    def __init__(self, total: int, *, done: int, every: int, visible: bool):
        self._total, self._every, self._visible = total, every, visible
        only_terminals = None if visible else True
        self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, disable=only_terminals)

    def show(self, step: int, values: Mapping[str, Any]) -> None:
        """Report a finished step."""
        text = f"loss {values['loss']:.4f}, grad norm {values['grad_norm']:.3f}, {values['tokens']} tokens"
        if "tokens_per_second" in values:
            text += f", {values['tokens_per_second']:.0f}/s"
        if "mfu" in values:
            text += f", MFU {values['mfu']:.1%}"
        evaluated = [name for name in values if name.startswith("eval_loss")]  # with the names of sets
        for name in evaluated:
            text += f", {name.replace('_', ' ', 1)} {values[name]:.4f}"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
        due = step % self._every == 0 or step == self._total or evaluated
        if self._visible and self._bar.disable and due:
            logger.info("step %d of %d: %s, %.3f s", step, self._total, text, values["seconds"])

    def close(self) -> None:
        self._bar.close()
