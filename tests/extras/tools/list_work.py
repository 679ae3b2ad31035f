"""What is measured of a packed list, for ``private_growth``: this file imports nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from energon_lite.extras.tools.packed_list import PackedList

Work = Callable[[], bool]


def record(number: int) -> dict[str, Any]:
    return {"id": number, "path": f"images/{number:09d}.jpg", "caption": f"picture number {number}", "size": [640, 480]}


def read_packed(path: str, count: int) -> Work:
    packed = PackedList.open(path)
    return lambda: _are_all(packed, count)


def read_plain(count: int) -> Work:
    records = [record(number) for number in range(count)]
    return lambda: _are_all(records, count)


def _are_all(items: Iterable[dict[str, Any]], count: int) -> bool:
    total = sum(next(iter(list(item.values()))) for item in items)  # looks at all that is in it
    return bool(total == count * (count - 1) // 2)
