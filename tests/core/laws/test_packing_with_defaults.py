"""Packing with no selection of one's own: full packs, full batches and small states, with all defaults."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from energon_lite import BestFit, Capacity, SkipSample, get_processing_dataset, get_savable_loader, register_source
from energon_lite.errors import FatalSampleError
from tests.testing import ALONE, Listed, take, train_loader, val_loader

CAPACITY = 4096


def tokens_of(mix: str, count: int) -> Any:
    """Chats; images of four sizes with a caption; texts with up to four images between them."""
    draw = np.random.default_rng(3)
    median, sigma = {"chat": (245, 0.9), "image-text": (120, 0.8), "interleaved": (700, 0.7)}[mix]
    tokens = draw.lognormal(np.log(median), sigma, count)
    if mix == "image-text":
        tokens += draw.choice([256, 576, 1024, 1600], count, p=[0.3, 0.4, 0.2, 0.1])
    elif mix == "interleaved":
        tokens += 256 * draw.integers(0, 5, count)
    return np.clip(tokens, 8, CAPACITY).astype(int)


class Mix:
    """Samples that are nothing but a length."""

    def __init__(self, url: str):
        self.identity = url
        mix, _, count = url.removeprefix("mix://").partition("-of-")
        self.tokens = tokens_of(mix, int(count or 20_000))

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, index: int) -> dict[str, Any]:
        return {"length": int(self.tokens[index]), "index": index}


register_source("mix", lambda url, split_part: Mix(url))


class Packed(Listed):
    """All that has to be written."""

    pack_capacity = np.int64(CAPACITY)

    def __init__(self, skips: int = 0):
        self.skips = skips

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        if self.skips and sample["index"] % self.skips == 0:
            raise SkipSample("not this one")
        return {"index": sample["index"], "tokens": range(sample["length"])}

    def pack_selected_samples(self, samples: list[Any]) -> dict[str, Any]:
        return {"tokens": sum(len(one["tokens"]) for one in samples), "indices": [one["index"] for one in samples]}

    def sample_length(self, sample: Any) -> int:
        return len(sample["tokens"])


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("mix", ["chat", "image-text", "interleaved"])
def test_fill_with_defaults(mix: str, size: int) -> None:
    with train_loader(f"mix://{mix}", task_encoder=Packed(), batch_size=size) as loader:
        batches = take(loader, 320 // size)
        state, stats = loader.save_state_rank(), loader.stats()
    packs = [pack for batch in batches for pack in batch]
    assert {len(batch) for batch in batches} == {size}
    assert max(pack["tokens"] for pack in packs) <= CAPACITY
    assert sum(pack["tokens"] for pack in packs) / (len(packs) * CAPACITY) > 0.97
    shown = Counter(index for pack in packs for index in pack["indices"])
    assert max(shown.values()) == 1 and stats["samples"] == len(shown)
    assert stats["skipped"] == stats["failed"] == stats["dropped"] == 0
    assert len(json.dumps(state)) < 4096


@pytest.mark.parametrize("samples", [1, 10, 100])
def test_small_data(samples: int) -> None:
    """Packs of several epochs have no sample twice."""
    with train_loader(f"mix://chat-of-{samples}", task_encoder=Packed(), batch_size=1) as loader:
        packs = [pack["indices"] for batch in take(loader, 150) for pack in batch]
    assert all(len(set(pack)) == len(pack) for pack in packs)
    shown = Counter(index for pack in packs for index in pack)
    assert len(shown) == samples


def test_nothing_is_lost_in_a_pass() -> None:
    with val_loader("mix://chat-of-8000", task_encoder=Packed(skips=7), batch_size=8, lanes=4) as loader:
        batches = list(loader)
        stats = loader.stats()
    shown = Counter(index for batch in batches for pack in batch for index in pack["indices"])
    assert shown == Counter(index for index in range(8000) if index % 7)
    assert stats["skipped"] == 8000 - len(shown) and stats["dropped"] == 0
    short = [number for number, batch in enumerate(batches) if len(batch) < 8]
    assert short and min(short) >= len(batches) - 3 * 4  # at the end, where no chunk follows


def test_a_sample_that_is_longer_than_a_pack() -> None:
    class Short(Packed):
        pack_capacity = 100

    with pytest.raises(FatalSampleError, match="does not fit into a pack of 100"):
        next(iter(train_loader("mix://chat", task_encoder=Short(), batch_size=1)))


def test_where_nothing_is_packed() -> None:
    """A plan packs, and jobs that go through the data once want single samples."""
    job = get_processing_dataset("mix://chat", task_encoder=Packed(), worker_config=ALONE)
    assert [one["index"] for one in take(get_savable_loader(job), 3)] == [0, 1, 2]
    planned = train_loader(
        "mix://chat", task_encoder=Packed(), batching=BestFit(Capacity(CAPACITY)), length_column=None
    )
    assert "packing_buffer_size" not in planned.dataset.identity.settings
