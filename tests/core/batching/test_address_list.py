"""Addresses by columns are the list of addresses."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from energon_lite.batching.digests import AddressList


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), max_size=9), st.integers(-10, 10), st.integers(-10, 10))
def test_it_is_the_list_of_its_addresses(rows: list[tuple[int, int, int]], start: int, stop: int) -> None:
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], []]
    addresses = AddressList(*columns)
    assert addresses == rows and rows == addresses and list(addresses) == rows and len(addresses) == len(rows)
    assert [addresses[place] for place in range(len(rows))] == rows
    assert addresses[start:stop] == rows[start:stop]
    assert pickle.loads(pickle.dumps(addresses)) == rows
    assert repr(addresses) == repr(rows) and bool(addresses) == bool(rows)
    assert addresses != [*rows, (0, 0, 0)] and addresses != tuple(rows)
