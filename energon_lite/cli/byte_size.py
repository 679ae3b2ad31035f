"""Formatting of sizes in bytes."""

from __future__ import annotations

import re

from energon_lite.errors import UsageError

__all__ = ["byte_size", "parse_bytes"]

_UNITS = ("B", "kB", "MB", "GB", "TB")
_MULTIPLES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


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


def parse_bytes(text: str) -> int:
    """Parse an amount of memory, ``6G``, ``500 MiB`` or ``1000``, to bytes.

    Raises:
        UsageError: the text is no amount of memory.

    Example:
        >>> parse_bytes("1.5k"), parse_bytes("2 GiB")
        (1536, 2147483648)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if not match or not float(match[1]):
        raise UsageError(f"{text!r} is not an amount of memory", fix="write 6G, or 500M")
    return int(float(match[1]) * _MULTIPLES[match[2]])
