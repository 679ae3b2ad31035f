from __future__ import annotations

import pytest

from energon_lite.cli.output import byte_size


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (3_456_789, "3.457 MB"), (2 * 10**15, "2000 TB")]
)
def test_the_unit_suits_the_size(count: int, text: str) -> None:
    assert byte_size(count) == text
