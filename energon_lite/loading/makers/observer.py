"""Interface of observers of the pipeline: they time the steps, or record the last step before a crash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from energon_lite.loading.makers.outcomes import Address

__all__ = ["Observer"]


class Observer(Protocol):
    """Receiver of a notification before each step.

    Attributes:
        sees_samples: make samples one by one, also if they could be collated field by field.
        times_samples: decode samples one by one, also if no hook sees them before the batch hooks do.
    """

    sees_samples: bool
    times_samples: bool

    def begin(self) -> None:
        """Note that a batch is begun."""

    def step(self, stage: str, leaf: str, key: str) -> None:
        """Note that a step is about to begin.

        Args:
            stage: ``read``, ``decode``, ``decode_columns`` (of several samples), or the name of a hook.
            leaf: the name of the data set; ``"*"``: several samples.
            key: the name of the sample, or the number of samples.
        """

    def end(self, addresses: Sequence[Address | None]) -> dict[str, Any] | None:
        """Note that the batch of these samples is made; return the ``trace`` of its result."""
