"""Sink that writes numbers as lines of JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["MetricsFile"]


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
