from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import UsageError
from energon_lite.extras.balance.capacity_trial import largest_fitting


@given(
    limit=st.integers(0, 10_000),
    start=st.integers(1, 5000),
    most=st.integers(100, 20_000),
    multiple=st.integers(1, 100),
    precision=st.sampled_from([0.0, 0.01, 0.1]),
)
def test_the_largest_multiple_that_fits(limit: int, start: int, most: int, multiple: int, precision: float) -> None:
    tried: list[int] = []

    def fits(capacity: int) -> bool:
        tried.append(capacity)
        return capacity <= limit

    found = largest_fitting(fits, start=start, most=most, multiple=multiple, precision=precision)
    best = min(limit, most) // multiple * multiple
    assert found <= best and found % multiple == 0
    assert best - found <= max(0, found * precision)
    assert len(set(tried)) == len(tried) <= 32 and all(0 < one <= most and one % multiple == 0 for one in tried)
    assert found == 0 or found in tried


def test_few_tries() -> None:
    tried: list[int] = []

    def fits(capacity: int) -> bool:
        tried.append(capacity)
        return capacity <= 13_500

    assert largest_fitting(fits, start=1024, multiple=64) == 13_440
    assert tried[:5] == [1024, 2048, 4096, 8192, 16_384] and len(tried) == 11


@pytest.mark.parametrize(("start", "most", "multiple"), [(0, 10, 1), (1, 0, 1), (1, 10, 0), (1, 10, 20)])
def test_nothing_to_try(start: int, most: int, multiple: int) -> None:
    with pytest.raises(UsageError, match="there is no multiple"):
        largest_fitting(lambda capacity: True, start=start, most=most, multiple=multiple)
