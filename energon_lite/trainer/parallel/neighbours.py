"""Things in a row, cut into groups of neighbours that are not too large: buckets of parameters, files of tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def neighbours(sized: Iterable[tuple[T, int]], most: int) -> list[list[T]]:
    """The things in order, in groups of at most some size in all, or of one thing.

    Args:
        sized: each thing with its size.
        most: size of a group.

    Example:
        >>> neighbours([("a", 2), ("b", 1), ("c", 9), ("d", 3)], 3)
        [['a', 'b'], ['c'], ['d']]
    """
    groups: list[list[T]] = []
    filled = 0
    for thing, size in sized:
        if not groups or filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(thing)
        filled += size
    return groups
