"""Groups of neighbours: nothing is lost, none is too large, and none could take in the next one."""

from __future__ import annotations

from itertools import chain, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.trainer.parallel.neighbours import neighbours
from tests.testing import examples


@settings(max_examples=examples(200))
@given(st.lists(st.integers(0, 9)), st.integers(0, 12))
def test_groups(sizes: list[int], most: int) -> None:
    groups = neighbours(list(enumerate(sizes)), most)
    assert list(chain.from_iterable(groups)) == list(range(len(sizes))) and all(groups)
    total = [sum(sizes[number] for number in group) for group in groups]
    assert all(size <= most or len(group) == 1 for size, group in zip(total, groups, strict=True))
    assert all(size + sizes[following[0]] > most for size, (_, following) in zip(total, pairwise(groups), strict=False))
