"""Lengths of samples, wherever they are kept."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Lengths"]


class Lengths(Protocol):
    """The lengths of a leaf's samples: an array, or something that can be asked like one."""

    def __len__(self) -> int:
        """Samples of the leaf."""

    def __getitem__(self, key: Any) -> Any:
        """Lengths of samples ``key``, an int64 array."""
