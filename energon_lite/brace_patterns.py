"""Brace patterns such as ``shard-{000..127}.tar``, with a bound on what they stand for that is known before they are
expanded: a few characters may stand for more names than any memory holds."""

from __future__ import annotations

import re
from string import ascii_lowercase, ascii_uppercase

__all__ = ["MAX_NAMES", "expand_braces"]

#: Names that a pattern may stand for, and the characters of all of them together.
MAX_NAMES = 1_000_000
_MAX_TEXT = 1 << 28
#: Longer patterns, deeper braces and longer numbers are no lists of shards.
_MAX_LENGTH, _MAX_DEPTH, _MAX_DIGITS = 1 << 16, 20, 100
_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?")
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
    count = _count(re.sub(r"\\.", "__", pattern, flags=re.DOTALL))
    if count > most or count * len(pattern) > _MAX_TEXT:
        raise ValueError(f"stand for {f'{count:,}' if count < 10**15 else 'far too many'} names, which are too many")
    return list(braceexpand(pattern))


def _count(text: str) -> int:
    """How many names a pattern without backslashes stands for."""
    # Of each brace that is open: its place, the names of the alternatives before, and those of the current one.
    opened = [[-1, 0, 1]]
    for place, char in enumerate(text):
        if char == "{":
            opened.append([place, 0, 1])
            if len(opened) > _MAX_DEPTH + 1:
                raise ValueError(f"are nested more than {_MAX_DEPTH} deep")
        elif char == "," and len(opened) > 1:
            start, before, current = opened[-1]
            opened[-1] = [start, before + current, 1]
        elif char == "}":
            start, before, current = opened.pop()
            if not opened:
                raise ValueError("do not match")
            opened[-1][2] *= _count_range(text[start + 1 : place]) or before + current
    if len(opened) > 1:
        raise ValueError("do not match")
    return opened[0][2]


def _count_range(text: str) -> int:
    """The entries of a range such as ``0..9..3`` or ``a..f``; 0: it is none."""
    if found := _NUMBERS.fullmatch(text):
        first, last = int(found[1]), int(found[2])
    elif found := _LETTERS.fullmatch(text):
        first, last = (_ALPHABET.index(found[side]) for side in (1, 2))
    else:
        return 0
    return abs(last - first) // (int(found[3] or 1) or 1) + 1
