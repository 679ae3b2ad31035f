"""Formatting for the terminal: sizes in bytes, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from energon_lite.errors import UsageError

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


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: a power of 1000 with ``B`` (``5GB``), else of 1024 (``6G``, ``500 MiB``).

    Raises:
        UsageError: the text is not a number of bytes, or 0.

    Example:
        >>> parse_bytes("5GB"), parse_bytes("1.5k"), parse_bytes("2 GiB")
        (5000000000, 1536, 2147483648)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]?)(i?b)?\s*", text.lower())
    base = 1000 if match and match[3] == "b" else 1024
    count = int(float(match[1]) * base ** " kmgt".index(match[2] or " ")) if match else 0
    if count < 1:
        raise UsageError(f"{text!r} is not a number of bytes", fix="write 6G, 500MiB, or 5GB")
    return count


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Align the columns of a table: the first one to the left, the others to the right.

    Example:
        >>> list(aligned([["name", "n"], ["a", "12"]]))
        ['name   n', 'a     12']
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()
