"""Who looks on while samples are made: to time the steps, or to note the last one before a crash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from energon_lite.loading.makers.outcomes import Address

__all__ = ["Observer"]


class Observer(Protocol):
    """Is told of each step before it is taken.

    Attributes:
        sees_samples: samples are made one by one, also where they could be batched field by field.
        times_samples: samples are decoded one by one, also where no hook sees them before those of batches do.
    """

    sees_samples: bool
    times_samples: bool

    def begin(self) -> None:
        """A batch is begun."""

    def step(self, stage: str, leaf: str, key: str) -> None:
        """A step is about to be taken.

        Args:
            stage: ``read``, ``decode``, ``decode_columns`` (of several samples), or the name of a hook.
            leaf: the name of the data set; ``"*"``: it is about several samples.
            key: what it is about: the sample's name, or how many there are.
        """

    def end(self, addresses: Sequence[Address | None]) -> dict[str, Any] | None:
        """The batch of these samples is made; what it becomes in its result's ``trace``."""
