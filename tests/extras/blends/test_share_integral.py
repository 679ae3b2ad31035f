"""Integrals of shares in fixed point: exact, beside fractions of unlimited length."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.extras.blends.stages import Ideal, ShareIntegral, _times
from energon_lite.order.blend import integer_shares

weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1.0)), min_size=1, max_size=6).filter(any)


def exact(ideal: Ideal) -> list[Fraction]:
    return [
        Fraction(whole) + Fraction(fraction, 1 << 62)
        for whole, fraction in zip(ideal.whole.tolist(), ideal.fraction.tolist(), strict=True)
    ]


@given(shares=st.lists(st.integers(0, 1 << 62), min_size=1, max_size=9), x=st.integers(0, 1 << 93))
def test_products_of_large_integers(shares: list[int], x: int) -> None:
    found = _times(np.array([*shares, 0, 1 << 62]), x)
    for share, value in zip([*shares, 0, 1 << 62], exact(found), strict=True):
        assert value == Fraction(share * x >> 31, 1 << 62)


@given(first=weights, data=st.data(), start=st.integers(0, 2**50), length=st.integers(1, 2**61))
def test_the_integral_of_a_straight_line(first: list[float], data: st.DataObject, start: int, length: int) -> None:
    last = data.draw(st.lists(st.floats(0, 1), min_size=len(first), max_size=len(first)).filter(any))
    one, other = (integer_shares(values, zero=True) for values in (first, last))
    base = Ideal(np.arange(len(first)), np.full(len(first), 3 << 60, dtype=np.uint64))
    x = data.draw(st.integers(0, length))
    found = exact(ShareIntegral(start, base, one, other, length).before(start + x))
    for leaf, value in enumerate(found):
        a, b = Fraction(int(one[leaf]), 1 << 62), Fraction(int(other[leaf]), 1 << 62)
        integral = leaf + Fraction(3, 4) + a * x + (b - a) * x * x / (2 * length)
        assert abs(value - integral) < Fraction(1, 1 << 30)
    total = sum(range(len(first))) + Fraction(3, 4) * len(first) + x
    assert abs(sum(found) - total) < Fraction(1, 1 << 50)  # whatever was rounded: nothing is created or lost


def test_sums_are_rounded_to_the_nearest() -> None:
    quarters = Ideal(np.array([1, 2, 3]), np.full(3, 1 << 60, dtype=np.uint64))
    assert quarters.total(np.array([True, False, False])) == 1
    assert quarters.total(np.array([True, True, False])) == 4
    assert quarters.total(np.array([True, True, True])) == 7
