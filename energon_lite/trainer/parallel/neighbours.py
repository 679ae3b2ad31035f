"""Division of a sequence into groups of neighbours of limited size: buckets of parameters, files of tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def neighbours(sized: Iterable[tuple[T, int]], most: int) -> list[list[T]]:
    """Divide things in order into groups of limited total size, or of one thing.

    Args:
        sized: pairs of a thing and its size.
        most: the largest total size of a group.

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
