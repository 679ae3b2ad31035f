"""Samples of known lengths, batched by tokens: the data of some laws."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from energon_lite import BestFit, Capacity, TaskEncoder, WorkerConfig, get_train_dataset, pack_sequences, stateless
from energon_lite.batching import TokenSequence
from tests.testing import ALONE, examples

CAPACITY = 100


def length_of(index: int) -> int:
    """Tokens of sample ``index`` of any leaf: 1 to 60."""
    return index * 37 % 60 + 1


class Tokens(TaskEncoder):
    """Sequences of known lengths, whose tokens say which sample they are of, and packed batches."""

    longer = 0

    @stateless
    def encode_sample(self, sample: Any) -> TokenSequence:
        leaf, index = sample.__restore_key__[1:3]
        tokens = torch.arange(length_of(index) + self.longer) + 1000 * (index + 1000 * leaf)
        return TokenSequence.derive_from(sample, tokens=tokens, labels=tokens)

    @stateless
    def batch(self, samples: list[TokenSequence]) -> Any:
        return pack_sequences(samples, pad=-1)

    def empty_batch(self, like: Any, rows: int) -> Any:
        return pack_sequences([], pad=-1)


def tokens_of(batches: Iterable[Any]) -> list[list[int]]:
    return [batch.tokens[0].tolist() for batch in batches]


def sequences(batches: list[Any]) -> list[list[int]]:
    """The tokens of micro-batches that have any."""
    return [tokens for tokens in tokens_of(batches) if tokens]


#: Documents of strategies.
DOCUMENTS: tuple[dict[str, Any], ...] = (
    {"strategy": "best_fit", "capacity": CAPACITY, "open_bins": 3},
    {"strategy": "bfd", "capacity": CAPACITY},
    {"strategy": "bfd", "capacity": 50, "oversize": "split"},
    {"strategy": "sorted_window", "capacity": CAPACITY, "batches": 4},
    {"strategy": "concat_split", "tokens": 64},
    {"strategy": "capacity", "capacity": 45, "oversize": "drop"},
    {"strategy": "fixed", "batch_size": 3},
    {"strategy": "max_length", "batch_size": 3, "max_length": 20, "oversize": "truncate"},
    {"strategy": "length_difference", "batch_size": 4, "max_difference": 5},
)
STRATEGIES = st.sampled_from(DOCUMENTS)
SEGMENTS = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from([0, 0, 0, 0, 2]), st.integers(0, 8)), min_size=1, max_size=4
)
QUIET = settings(deadline=None, max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])


def dataset_of(path: Any, config: WorkerConfig = ALONE, encoder: TaskEncoder | None = None, **more: Any) -> Any:
    arguments: dict[str, Any] = {"batch_size": None, "batching": BestFit(Capacity(CAPACITY)), "chunk_size": 40, **more}
    return get_train_dataset(path, worker_config=config, task_encoder=encoder or Tokens(), **arguments)
