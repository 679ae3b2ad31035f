"""Ranks that make batches by the lengths of encoded samples, and end together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from energon_lite import WorkerConfig, get_savable_loader
from tests.core.laws.token_data import dataset_of, length_of, tokens_of


def test_ranks_end_a_pass_together(run_ranks: Any, leaf_of: Callable[[int], Any]) -> None:
    """Lanes end at different steps: the ranks agree on each step by one small exchange, and nobody hangs."""
    path = leaf_of(50)

    def walk(rank: int) -> list[list[int]]:
        config = WorkerConfig(rank=rank, world_size=3, num_workers=0)
        return tokens_of(get_savable_loader(dataset_of(path, config, length_column=None, chunk_size=7, repeat=False)))

    found = run_ranks(3, walk)
    assert len({len(batches) for batches in found}) == 1
    assert any(not batch for batches in found for batch in batches)  # some rank has run out before the others
    tokens = sorted(token for batches in found for batch in batches for token in batch)
    assert tokens == [1000 * index + token for index in range(50) for token in range(length_of(index))]
