"""Formatting of text tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["aligned"]


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
