"""Expansion of brace patterns such as ``shard-{000..127}.tar``, with a bound on the result.

The bound is checked before the expansion: a few characters may stand for more names than fit into memory.
"""

from __future__ import annotations

import re
from string import ascii_lowercase, ascii_uppercase

__all__ = ["MAX_NAMES", "expand_braces"]

#: Largest number of names of a pattern.
MAX_NAMES = 1_000_000
#: Largest number of characters of all names together.
_MAX_TEXT = 1 << 28
#: Largest number of characters of a pattern. Beyond this limit and the next ones, it is no list of shards.
_MAX_LENGTH = 1 << 16
#: Largest nesting depth of braces.
_MAX_DEPTH = 20
#: Bound on the digits of a number, exclusive.
_MAX_DIGITS = 100
_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?")
_ALPHABET = ascii_uppercase + ascii_lowercase
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d+))?")


def expand_braces(pattern: str, most: int = MAX_NAMES) -> list[str]:
    """Expand a pattern to its names, in order.

    Args:
        pattern: text with ranges ``{000..127}``, ``{0..9..3}``, ``{a..f}`` and alternatives ``{x,y}``, nested; a
            backslash before a brace makes it a plain character.
        most: largest number of names.

    Raises:
        ValueError: the braces do not match, or give too many names; the message says which.

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
    """Number of names of a pattern without backslashes."""
    # For each open brace: its place, the number of names of the earlier alternatives, and of the current one.
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
    """Number of entries of a range such as ``0..9..3`` or ``a..f``; 0 for other texts."""
    if match := _NUMBERS.fullmatch(text):
        first, last = int(match[1]), int(match[2])
    elif match := _LETTERS.fullmatch(text):
        first, last = (_ALPHABET.index(match[side]) for side in (1, 2))
    else:
        return 0
    return abs(last - first) // (int(match[3] or 1) or 1) + 1
