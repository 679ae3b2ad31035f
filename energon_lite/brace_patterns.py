"""Brace patterns such as ``shard-{000..127}.tar``, with a bound on what they stand for that is known before they are
expanded: a few characters may stand for more names than any memory holds."""

from __future__ import annotations

import re
from itertools import accumulate
from string import ascii_lowercase, ascii_uppercase

__all__ = ["MAX_NAMES", "expand_braces"]

#: Names that a pattern may stand for, and the characters of all of them together.
MAX_NAMES = 1_000_000
_MAX_TEXT = 1 << 28
#: Longer patterns, deeper braces and longer numbers are no lists of shards.
_MAX_LENGTH, _MAX_DEPTH, _MAX_DIGITS = 1 << 16, 20, 100
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?")
_ALPHABET = ascii_uppercase + ascii_lowercase
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d+))?")


def expand_braces(pattern: str, most: int = MAX_NAMES) -> list[str]:
    """The names that a pattern stands for, in order.

    Args:
        pattern: text with ranges ``{000..127}``, ``{0..9..3}``, ``{a..f}`` and alternatives ``{x,y}``, nested; a
            backslash before a brace takes its meaning away.
        most: so many names at most.

    Raises:
        ValueError: the braces do not match, or stand for too much; says which.

    Example:
        >>> expand_braces("{train,val}/{08..10}.tar")[:4]
        ['train/08.tar', 'train/09.tar', 'train/10.tar', 'val/08.tar']
    """
    from braceexpand import braceexpand

    if "{" not in pattern and "}" not in pattern and "\\" not in pattern:
        if most < 1:
            raise ValueError("stand for too many names")
        return [pattern]
    if len(pattern) > _MAX_LENGTH:
        raise ValueError(f"have more than {_MAX_LENGTH} characters")
    if re.search(rf"\d{{{_MAX_DIGITS},}}\.\.|\.\.-?\d{{{_MAX_DIGITS},}}", pattern):
        raise ValueError(f"have a number of {_MAX_DIGITS} digits or more")
    plain = re.sub(r"\\.", "__", pattern, flags=re.DOTALL)
    if max(accumulate((char == "{") - (char == "}") for char in plain)) > _MAX_DEPTH:
        raise ValueError(f"are nested more than {_MAX_DEPTH} deep")
    count = _count(plain)
    if count > most or count * len(pattern) > _MAX_TEXT:
        raise ValueError(f"stand for {f'{count:,}' if count < 10**15 else 'far too many'} names, which are too many")
    return list(braceexpand(pattern))


def _count(text: str) -> int:
    """How many names a pattern without backslashes stands for."""
    count = 1
    for start, stop in _groups(text):
        count *= _count_inside(text[start + 1 : stop])
    return count


def _count_inside(text: str) -> int:
    """The same for what is between a brace and the one that closes it."""
    numbers, letters = _RANGE.fullmatch(text), _LETTERS.fullmatch(text)
    if numbers is not None:
        first, last = int(numbers[1]), int(numbers[2])
        return abs(last - first) // (int(numbers[3] or 1) or 1) + 1
    if letters is not None:
        first, last = (_ALPHABET.index(letters[side]) for side in (1, 2))
        return abs(last - first) // (int(letters[3] or 1) or 1) + 1
    inner = _groups(text)
    commas = [place for place, char in enumerate(text) if char == ","]
    edges = [place for place in commas if not any(start < place < stop for start, stop in inner)]
    if not edges:
        return _count(text)  # the braces stand for themselves
    starts, stops = [0, *(edge + 1 for edge in edges)], [*edges, len(text)]
    return sum(_count(text[start:stop]) for start, stop in zip(starts, stops, strict=True))


def _groups(text: str) -> list[tuple[int, int]]:
    """The outermost braces of a text, and those that close them."""
    found: list[tuple[int, int]] = []
    depth = start = 0
    for place, char in enumerate(text):
        if char == "{":
            start = start if depth else place
            depth += 1
        elif char == "}":
            depth -= 1
            if depth < 0:
                raise ValueError("do not match")
            if not depth:
                found.append((start, place))
    if depth:
        raise ValueError("do not match")
    return found
