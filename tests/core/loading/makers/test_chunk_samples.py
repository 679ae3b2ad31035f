"""Chunks on slow storage: their bytes are requested together, and are the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    ReadAhead,
    TaskEncoder,
    TextSample,
    get_savable_loader,
    get_train_dataset,
)
from energon_lite.extras.remote import range_cache
from energon_lite.storage.files.shard_store import ShardStore
from tests.testing import ALONE


class Twice(TaskEncoder):
    """Each sample comes twice, so that only the hooks know how many there are."""

    def encode_sample(self, sample: TextSample) -> Iterator[TextSample]:
        yield sample
        yield sample


def keys(data: Path, batches: int, **options: Any) -> list[tuple[str, ...]]:
    dataset = get_train_dataset(data, batch_size=7, worker_config=ALONE, task_encoder=Twice(), **options)
    with get_savable_loader(dataset) as loader:
        return [tuple(batch.__key__) for batch in islice(loader, batches)]


def test_requests_of_a_chunk_are_made_at_the_same_time(
    leaf_of: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = keys(leaf_of(200), 12)
    read, changed = ShardStore.read, threading.Condition()
    now = most = 0

    def watched(self: ShardStore, *arguments: Any) -> bytes:
        """Read once five requests are open, after a sixth has had the time to come."""
        nonlocal now, most
        with changed:
            now, first = now + 1, most < 5
            most = max(most, now)
            changed.notify_all()
            changed.wait_for(lambda: most >= 5, timeout=1)
            if first:
                changed.wait_for(lambda: most > 5, timeout=0.05)
        try:
            return read(self, *arguments)
        finally:
            with changed:
                now -= 1

    monkeypatch.setattr(ShardStore, "read", watched)
    monkeypatch.setattr(range_cache, "_shared", {})
    assert keys(leaf_of(200), 12, read_ahead=ReadAhead(requests=5)) == expected
    assert most == 5
