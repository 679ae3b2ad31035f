"""The records of a pax extended header: what a tar says about a member beyond its plain header."""

from __future__ import annotations

import re

__all__ = ["SPARSE", "pax_records", "text_of"]

#: Key under which :func:`pax_records` tells that a member is stored sparsely.
SPARSE = "GNU.sparse"
#: No file is larger than numbers of so many digits say, and of thousands of digits Python makes no number.
_SIZE_DIGITS = 20
#: A single record, the most frequent one: seconds with a fraction.
_ONE_TIME = re.compile(rb"(\d+) [amc]time=[\d.]+\n")


def pax_records(text: bytes) -> dict[str, str]:
    """``path`` and ``size`` out of records of the form ``"<length> <key>=<value>\\n"``; other keys are left out.

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
    """A name as text. It need not be any; surrogateescape keeps foreign bytes so that they can be written back."""
    return raw.decode("utf-8", "surrogateescape")
