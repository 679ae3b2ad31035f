from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.storage.read.sample_choice import DenseExclusion, SparseExclusion


def check(kept: SparseExclusion | DenseExclusion, expected: np.ndarray) -> None:
    assert len(kept) == len(expected)
    numbers = np.arange(len(expected), dtype=np.int64)
    assert kept.places(numbers).tolist() == expected.tolist()
    shuffled = np.random.default_rng(1).permutation(numbers)
    assert kept.places(shuffled).tolist() == expected[shuffled].tolist()
    for number in {0, len(expected) // 2, len(expected) - 1} if len(expected) else ():
        assert kept.place(number) == expected[number]


@given(st.integers(0, 2000), st.floats(0, 1), st.integers(0, 99), st.lists(st.integers(0, 2000), max_size=4))
def test_both_forms_answer_as_numpy_does(samples: int, share: float, seed: int, cuts: list[int]) -> None:
    keep = np.random.default_rng(seed).random(samples) < share
    expected = np.flatnonzero(keep)
    check(SparseExclusion(samples, np.flatnonzero(~keep)), expected)
    # However the range is cut into pieces, whose lengths are no multiples of eight.
    pieces = np.split(keep, sorted(cut for cut in cuts if cut <= samples))
    check(DenseExclusion(samples, pieces), expected)
    assert DenseExclusion(samples, pieces).digest == DenseExclusion(samples, [keep]).digest


def test_the_digest_is_that_of_the_choice() -> None:
    rows = [[True, False, True], [True, True, False], [True, True, True]]
    digests = {DenseExclusion(3, [np.array(row)]).digest for row in rows}
    assert len(digests) == 3 and all(len(digest) == 32 for digest in digests)


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_memory_is_a_seventh_of_a_byte_for_a_sample(share: float) -> None:
    keep = np.random.default_rng(0).random(1_000_000) < share
    kept = DenseExclusion(len(keep), [keep])
    assert kept._bits.nbytes + kept._before.nbytes < 0.142 * len(keep)
    expected = np.flatnonzero(keep)
    some = np.random.default_rng(1).integers(0, len(expected), 10_000)
    assert (kept.places(some) == expected[some]).all()
