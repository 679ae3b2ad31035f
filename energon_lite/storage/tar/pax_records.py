"""The records of a pax extended header: what a tar says about a member beyond its plain header."""

from __future__ import annotations

import re

__all__ = ["SPARSE", "pax_records"]

#: Key under which :func:`pax_records` tells that a member is stored sparsely.
SPARSE = "GNU.sparse"
#: No file is larger than numbers of so many digits say, and of thousands of digits Python makes no number.
_SIZE_DIGITS = 20
#: A single record, the most frequent one: seconds with a fraction.
_ONE_TIME = re.compile(rb"(\d+) [amc]time=[\d.]+\n")


def pax_records(text: bytes) -> dict[str, bytes]:
    """``path`` and ``size`` out of records of the form ``"<length> <key>=<value>\\n"``; other keys are left out.

    Raises:
        ValueError: the text cannot be parsed.

    Example:
        >>> pax_records(b"30 mtime=1700000000.123456789\\n13 size=1000\\n")
        {'size': b'1000'}
    """
    one_time = _ONE_TIME.fullmatch(text)
    if one_time and int(one_time[1]) == len(text):
        return {}
    records: dict[str, bytes] = {}
    start = 0
    while start < len(text) and text[start]:
        length, space, _ = text[start : start + 20].partition(b" ")
        stop = start + int(length) if space and length.isdigit() else 0
        key, equals, value = text[start + len(length) + 1 : stop - 1].partition(b"=")
        if not start < stop <= len(text) or not equals or text[stop - 1 : stop] != b"\n":
            raise ValueError("its pax records cannot be parsed")
        if key.startswith(b"GNU.sparse"):
            records[SPARSE] = value
        elif key == b"path":
            records["path"] = value
        elif key == b"size":
            if not value.isdigit() or len(value) > _SIZE_DIGITS:
                raise ValueError("its pax size is no number")
            records["size"] = value
        start = stop
    return records
