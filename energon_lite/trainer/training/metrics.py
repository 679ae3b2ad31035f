"""What a run reports: the numbers of each step, to a file, to others who draw them, and to whoever looks on."""

from __future__ import annotations

import json
import logging
import math
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from energon_lite.errors import UsageError
from energon_lite.trainer.training.config import TrainerConfig
from energon_lite.trainer.training.config_file import config_to_dict

logger = logging.getLogger(__name__)


class MetricsSink(Protocol):
    """Where the numbers of each step go. One is made on the main rank when a run begins or goes on.

    A class whose instances are made with the last step that counts (0 for a new run) fits into ``Trainer(sinks=...)``:

    Example:
        >>> class Printer:
        ...     def __init__(self, after: int): ...
        ...     def write(self, values): print(values["step"], values["loss"])
        ...     def close(self): ...
        >>> Trainer(config, sinks=[Printer])
    """

    def write(self, values: Mapping[str, Any]) -> None:
        """Take the numbers of a step, ``values["step"]`` among them."""

    def close(self) -> None:
        """The run ends."""


#: Makes a sink, given the last step that counts.
SinkMaker = Callable[[int], MetricsSink]


def make_sinks(config: TrainerConfig, after: int, more: Iterable[SinkMaker] = ()) -> list[MetricsSink]:
    """Those that a run's configuration asks for, and others.

    Args:
        config: of the run.
        after: the last step that counts.
        more: make the others.

    Raises:
        UsageError: a package for it is not installed.
    """
    output, train = Path(config.output), config.train
    sinks: list[MetricsSink] = [
        Progress(train.steps, done=after, every=train.log_every),
        MetricsFile(output / "metrics.jsonl", after=after),
    ]
    if train.tensorboard:
        sinks.append(TensorBoardFolder(output / "tensorboard", after=after))
    if train.wandb is not None:
        sinks.append(WandbRun(output, train.wandb, config_to_dict(config)))
    return [*sinks, *(make(after) for make in more)]


def write(sinks: Iterable[MetricsSink], values: Mapping[str, Any]) -> None:
    """Give the numbers of a step to all of them."""
    for sink in sinks:
        sink.write(values)


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
            _drop_lines(path, after or -1)  # an evaluation before the first step is made again, too
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
        self._writer = SummaryWriter(os.fspath(path), purge_step=after + 1 if after else 0)

    def write(self, values: Mapping[str, Any]) -> None:
        """Add the numbers of a step."""
        for name, value in values.items():
            if name != "step" and not isinstance(value, str):
                self._writer.add_scalar(name, value, values["step"])

    def close(self) -> None:
        self._writer.close()


class WandbRun:
    """The same numbers for Weights & Biases. A resumed run goes on there; of a step it has already, it keeps the first.

    Args:
        folder: where wandb has its files; the run's name there, for a resumed one, is in ``wandb-id`` beside them.
        settings: what ``wandb.init`` takes, for example ``{project: captions, mode: offline}``.
        config: what it shows as the run's configuration.

    Raises:
        UsageError: wandb is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], settings: Mapping[str, Any], config: Mapping[str, Any]):
        try:
            import wandb
        except ImportError:
            fix = "pip install energon-lite[wandb], or leave out train.wandb"
            raise UsageError("wandb is not installed", fix=fix) from None
        name = Path(folder, "wandb-id")
        if not name.exists():
            name.parent.mkdir(parents=True, exist_ok=True)
            name.write_text(uuid.uuid4().hex[:8])
        given = {"id": name.read_text(), "resume": "allow", "dir": os.fspath(folder), **settings}
        self._run = wandb.init(config=dict(config), **given)

    def write(self, values: Mapping[str, Any]) -> None:
        self._run.log({name: value for name, value in values.items() if name != "step"}, step=values["step"])

    def close(self) -> None:
        self._run.finish()


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
    """

    def __init__(self, total: int, *, done: int, every: int):
        self._total, self._every = total, every
        self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, disable=None)  # None: no terminal

    def write(self, values: Mapping[str, Any]) -> None:
        """Report a finished step."""
        step = values["step"]
        shown = {"loss": "loss {:.4f}", "grad_norm": "grad norm {:.3f}", "tokens": "{} tokens"}
        shown |= {"tokens_per_second": "{:.0f}/s", "mfu": "MFU {:.1%}"}
        evaluated = [name for name in values if name.startswith("eval_loss")]  # with the names of sets
        shown |= {name: f"{name.replace('_', ' ', 1)} {{:.4f}}" for name in evaluated}
        text = ", ".join(form.format(values[name]) for name, form in shown.items() if name in values)
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(int(step > 0))  # 0: an evaluation before the first
        due = step % self._every == 0 or step == self._total or evaluated
        if self._bar.disable and due:
            logger.info("step %d of %d: %s, %.3f s", step, self._total, text, values.get("seconds", 0.0))

    def close(self) -> None:
        self._bar.close()
