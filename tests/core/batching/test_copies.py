"""Copies of a sample that are moved apart."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.batching.epochs import keep_apart
from energon_lite.batching.micro_batches import MicroBatches


@given(data=st.data(), batches=st.integers(2, 6), rows=st.integers(1, 8))
def test_a_copy_changes_places_with_a_sample_as_long(data: st.DataObject, batches: int, rows: int) -> None:
    """Where all are as long, micro-batches keep their number and their size, even full ones."""
    owner = np.arange(1, batches * rows + 1)
    copies = data.draw(st.integers(2, batches))
    owner[data.draw(st.permutations(range(len(owner))))[:copies]] = 0
    sizes = np.full(len(owner), 7)
    whole = MicroBatches.of([np.arange(len(owner))], sizes, packed=False)
    planned = whole.regrouped(np.arange(len(owner)), [rows] * batches)
    apart = keep_apart(planned, owner, sizes, np.zeros_like(sizes), lambda sizes, keys: False)
    assert apart.rows().tolist() == [rows] * batches
    assert sorted(apart.sample.tolist()) == list(range(len(owner)))
    assert all(np.count_nonzero(owner[part] == 0) <= 1 for part in apart)


@given(
    groups=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=2, max_size=6),
    copies=st.integers(2, 6),
    data=st.data(),
)
def test_what_is_full_stays_within_its_limit(groups: list[list[int]], copies: int, data: st.DataObject) -> None:
    """However long the samples are that change places, and nobody is lost."""
    lengths = np.array([length for group in groups for length in group], dtype=np.int64)
    owner = np.arange(1, len(lengths) + 1)
    same = data.draw(st.permutations(range(len(owner))))[:copies]
    owner[same], lengths[same] = 0, lengths[same[0]]
    planned = MicroBatches.of([np.arange(len(owner))], lengths, packed=True).regrouped(
        np.arange(len(owner)), [len(group) for group in groups]
    )
    limit = int(planned.tokens().max())
    keys = np.zeros_like(lengths)
    apart = keep_apart(planned, owner, lengths, keys, lambda sizes, keys: sum(sizes) <= limit)
    assert apart.tokens().max() <= limit
    assert sorted(apart.sample.tolist()) == list(range(len(owner)))
    most = -(-len(same) // len(groups))
    assert all(np.count_nonzero(owner[part] == 0) <= most for part in apart)
