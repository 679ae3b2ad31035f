"""Interface of receivers of a run's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["MetricsSink"]


class MetricsSink(Protocol):
    """Receiver of numbers, at intervals.

    A loader takes sinks as ``metrics=``, and writes to them every ``metrics_every`` batches. A class whose instances
    are made with the last step that counts (0 for a new run) can be passed to ``Trainer(sinks=...)``; it is
    instantiated on the main rank when a run starts or resumes, and receives the numbers of each step.

    Example:
        >>> class Printer:
        ...     def __init__(self, after: int = 0): ...
        ...     def write(self, values): print(values["step"], values)
        ...     def close(self): ...
        >>> loader = get_savable_loader(dataset, metrics=[Printer()])
        >>> Trainer(config, sinks=[Printer])
    """

    def write(self, values: Mapping[str, Any]) -> None:
        """Receive the numbers, including ``values["step"]``."""

    def close(self) -> None:
        """Close the sink after the last numbers."""
