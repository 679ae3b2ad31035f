"""Plans that are made before they are wanted."""

from __future__ import annotations

import pytest

from energon_lite.batching.token_plan import PlansAhead
from energon_lite.errors import UsageError


def test_chunks_are_made_ahead_and_errors_come_when_they_are_due() -> None:
    made: list[int] = []

    def make(pass_number: int, number: int) -> int:
        made.append(number)
        if number == 9:
            raise UsageError("no")
        return number

    plans = PlansAhead(make)
    plans.prepare(0, 3)
    assert plans.get(0, 3) == 3 and plans.get(0, 3) == 3 and made == [3]
    plans.prepare(0, 9)
    with pytest.raises(UsageError):
        plans.get(0, 9)
    for number in range(10, 20):
        plans.get(0, number)
    assert len(plans._made) == 4
