"""The records of a pax extended header, which describe a tar member beyond its plain header."""

from __future__ import annotations

import re

__all__ = ["SPARSE", "pax_records", "text_of"]

#: Key by which :func:`pax_records` reports that a member is stored sparsely.
SPARSE = "GNU.sparse"
#: Digits of a size at most: enough for any file, and a limit for Python's conversion of long numbers.
_SIZE_DIGITS = 20
#: The most frequent text: a single record, with seconds and a fraction.
_ONE_TIME = re.compile(rb"(\d+) [amc]time=[\d.]+\n")


def pax_records(text: bytes) -> dict[str, str]:
    """Parse ``path`` and ``size`` from records ``"<length> <key>=<value>\\n"``; other keys are ignored.

    Raises:
        ValueError: the text cannot be parsed.

    Example:
        >>> pax_records(b"30 mtime=1700000000.123456789\\n13 size=1000\\n")
        {'size': '1000'}
    """
    one_time = _ONE_TIME.fullmatch(text)
    if one_time and int(one_time[1]) == len(text):
        return {}
    records: dict[str, str] = {}
    start = 0
    while start < len(text) and text[start]:
        length, space, _ = text[start : start + 20].partition(b" ")
        stop = start + int(length) if space and length.isdigit() else 0
        key, equals, value = text[start + len(length) + 1 : stop - 1].partition(b"=")
        if not start < stop <= len(text) or not equals or text[stop - 1 : stop] != b"\n":
            raise ValueError("its pax records cannot be parsed")
        if key.startswith(b"GNU.sparse"):
            records[SPARSE] = text_of(value)
        elif key == b"path":
            records["path"] = text_of(value).rstrip("/")
        elif key == b"size":
            if not value.isdigit() or len(value) > _SIZE_DIGITS:
                raise ValueError("its pax size is no number")
            records["size"] = text_of(value)
        start = stop
    return records


def text_of(raw: bytes) -> str:
    """Decode a name; surrogateescape keeps bytes that are no UTF-8, so that they can be written back."""
    return raw.decode("utf-8", "surrogateescape")
