"""Runs in windows: what is computed for a whole epoch is what is computed place by place."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.order import windows
from energon_lite.order.hashing import mix64
from tests.testing import examples


@settings(max_examples=examples(200))
@given(st.data())
def test_groups_do_not_matter(data: st.DataObject) -> None:
    epochs = data.draw(st.integers(1, 6))
    lengths = [data.draw(st.sampled_from([1, 7, 300, 1500, 5000, 70_000])) for _ in range(epochs)]
    run, window = data.draw(st.integers(2, 300)), data.draw(st.sampled_from([1, 5, 64, 900, 1500, 80_000]))
    asked = data.draw(st.integers(1, 3000))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    # Some epochs are asked for in full, some hardly.
    epoch = rng.choice(epochs, asked, p=rng.dirichlet(np.full(epochs, 0.5)))
    if data.draw(st.booleans()):
        epoch.sort()
    n = np.array(lengths, dtype=np.int64)[epoch]
    low = rng.integers(0, n) if data.draw(st.booleans()) else np.arange(asked) % n  # anywhere, or neighbours
    same = data.draw(st.booleans())  # leaves of different lengths may have one key
    keys = np.array([mix64(0 if same else one) for one in range(epochs)], dtype=np.uint64)[epoch]
    found = windows.runs_in_windows(low, n, keys, run, window)
    expected = windows._shuffle_runs(windows._mix_windows(low, n, keys, window), n, keys, run)
    assert found.dtype == np.int64 and (found == expected).all()


@given(st.integers(1, 4000), st.integers(2, 50), st.integers(1, 3000))
def test_an_epoch_is_a_permutation_of_whole_runs(n: int, run: int, window: int) -> None:
    places, key = np.arange(n), np.full(n, mix64(n), dtype=np.uint64)
    found = windows.runs_in_windows(places, np.full(n, n), key, run, window)
    assert sorted(found.tolist()) == places.tolist()
    # Inside a window nothing comes from elsewhere than the runs that begin or end there.
    whole = windows.runs_in_windows(places, np.full(n, n), key, run, 1)
    for start in range(0, n, window):
        assert set(found[start : start + window]) == set(whole[start : start + window])
