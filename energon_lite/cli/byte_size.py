"""Formatting of sizes in bytes."""

from __future__ import annotations

__all__ = ["byte_size"]

_UNITS = ("B", "kB", "MB", "GB", "TB")


def byte_size(count: float) -> str:
    """Format a number of bytes with four digits, in a unit that is a power of 1000.

    Example:
        >>> byte_size(12), byte_size(3_456_789)
        ('12 B', '3.457 MB')
    """
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            break
        count /= 1000
    return f"{count:.4g} {unit}"
