"""Interface for stored lengths of samples."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Lengths"]


class Lengths(Protocol):
    """Lengths of a leaf's samples: an array, or an object that is indexed like one."""

    def __len__(self) -> int:
        """Number of samples of the leaf."""

    def __getitem__(self, key: Any) -> Any:
        """Lengths of samples ``key`` in tokens, an int64 array."""
