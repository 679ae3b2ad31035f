"""What takes the numbers of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["MetricsSink"]


class MetricsSink(Protocol):
    """Where numbers go, from time to time.

    A loader takes sinks as ``metrics=``, and writes to them every ``metrics_every`` batches. A class whose instances
    are made with the last step that counts (0 for a new run) fits into ``Trainer(sinks=...)``; there, one is made on
    the main rank when a run begins or goes on, and gets the numbers of each step.

    Example:
        >>> class Printer:
        ...     def __init__(self, after: int = 0): ...
        ...     def write(self, values): print(values["step"], values)
        ...     def close(self): ...
        >>> loader = get_savable_loader(dataset, metrics=[Printer()])
        >>> Trainer(config, sinks=[Printer])
    """

    def write(self, values: Mapping[str, Any]) -> None:
        """Take the numbers, ``values["step"]`` among them."""

    def close(self) -> None:
        """No more come."""
