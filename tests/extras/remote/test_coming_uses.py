"""Next uses of samples are those of the order."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.extras.remote.coming_uses import ComingUses
from energon_lite.order.orders import BlendOrder, ConcatOrder, EpochBlendOrder, Rebase
from energon_lite.order.shuffle import LeafOrder
from tests.testing import examples


def orders() -> st.SearchStrategy[tuple[Any, list[int]]]:
    """Orders of all kinds, and the samples of their leaves."""
    lengths = st.lists(st.integers(1, 9), min_size=1, max_size=3)

    def made(lengths: list[int], kind: int, copies: int | None, key: int) -> tuple[Any, list[int]]:
        leaves = [LeafOrder(length, key + number, copies) for number, length in enumerate(lengths)]
        shares = [1.0 + number for number in range(len(lengths))]
        order: Any = ConcatOrder(lengths)
        if kind == 1:
            order = BlendOrder(leaves, shares, key)
        if kind == 2:
            order = EpochBlendOrder(leaves, shares, key)
        if kind == 3:
            order = BlendOrder(leaves, shares, key).rebased(
                Rebase(100, tuple(7 * number for number in range(len(leaves))))
            )
        return order, lengths

    return st.builds(made, lengths, st.integers(0, 3), st.sampled_from([1, 2, None]), st.integers(0, 99))


@settings(max_examples=examples(200))
@given(made=orders(), at=st.integers(0, 20_000), steps=st.lists(st.integers(0, 60), max_size=5))
def test_next_uses_are_those_of_the_order(made: tuple[Any, list[int]], at: int, steps: list[int]) -> None:
    order, lengths = made
    uses = ComingUses(order, lengths)
    end = order.bounds(0)[1] if isinstance(order, ConcatOrder) else sys.maxsize
    at = at % end if end < sys.maxsize else at + (100 if order.rebase else 0)
    for position in np.cumsum([at, *steps]):
        coming = order.lookup((position + np.arange(6 * sum(lengths))) % end)
        rows = list(zip(coming.leaf.tolist(), coming.index.tolist(), strict=True))
        far = uses.after(*coming.rows()[0])
        assert far == (rows.index(rows[0], 1) if far < math.inf else far)
        assert far < math.inf or rows[0] not in rows[1 : 2 * sum(lengths)]
        every = [(leaf, index) for leaf, length in enumerate(lengths) for index in range(length)]
        leaf, index = np.array(every).T
        for sample, distance in zip(every, uses.of(leaf, index, np.full(len(leaf), -1)).tolist(), strict=True):
            assert distance == (rows.index(sample) if distance < math.inf else distance)
            assert distance < math.inf or sample not in rows[: 2 * sum(lengths)]
