"""Ranks that make batches by the lengths of encoded samples, and end together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from energon_lite import (
    BestFit,
    Capacity,
    TaskEncoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    pack_sequences,
    stateless,
)
from energon_lite.batching import TokenSequence


class Tokens(TaskEncoder):
    """Packed batches of sequences of 1 to 60 tokens that say which sample they are of."""

    @stateless
    def encode_sample(self, sample: Any) -> TokenSequence:
        index = sample.__restore_key__[2]
        tokens = torch.full((index * 37 % 60 + 1,), index)
        return TokenSequence.derive_from(sample, tokens=tokens, labels=tokens)

    @stateless
    def batch(self, samples: list[TokenSequence]) -> Any:
        return pack_sequences(samples, pad=-1)

    def empty_batch(self, like: Any, rows: int) -> Any:
        return pack_sequences([], pad=-1)


def test_ranks_end_a_pass_together(run_ranks: Any, leaf_of: Callable[[int], Any]) -> None:
    """Lanes end at different steps: the ranks agree on each step by one small exchange, and nobody hangs."""
    path = leaf_of(50)

    def walk(rank: int) -> list[list[int]]:
        dataset = get_train_dataset(
            path,
            batch_size=None,
            batching=BestFit(Capacity(100)),
            length_column=None,
            chunk_size=7,
            repeat=False,
            task_encoder=Tokens(),
            worker_config=WorkerConfig(rank=rank, world_size=3, num_workers=0),
        )
        return [batch.tokens[0].tolist() for batch in get_savable_loader(dataset)]

    found = run_ranks(3, walk)
    assert len({len(batches) for batches in found}) == 1
    assert any(not batch for batches in found for batch in batches)  # some rank has run out before the others
    tokens = sorted(token for batches in found for batch in batches for token in batch)
    assert tokens == sorted(index for index in range(50) for _ in range(index * 37 % 60 + 1))
