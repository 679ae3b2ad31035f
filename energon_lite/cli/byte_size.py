"""Formatting of sizes in bytes."""

from __future__ import annotations

import re

import click

from energon_lite.errors import UsageError

__all__ = ["byte_size", "bytes_of", "parse_bytes"]

_UNITS = ("B", "kB", "MB", "GB", "TB")
#: Units of amounts of memory, and of sizes of files.
_MULTIPLES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_FACTORS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


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


def bytes_of(text: str) -> int:
    """Parse the size of a file, ``5GB`` or ``500MiB``, to bytes.

    Raises:
        click.BadParameter: the text is no size.

    Example:
        >>> bytes_of("5GB")
        5000000000
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = round(float(match[1]) * _FACTORS[match[2].upper()]) if match and match[2].upper() in _FACTORS else 0
    if size < 1:
        raise click.BadParameter(f"{text!r} is no size; write for example 5GB or 500MiB")
    return size


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
