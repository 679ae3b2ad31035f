"""Law 2: a state is plain, below 4 KiB, and saved in under a millisecond, with all that can make it large."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

from energon_lite.extras.blends import rebase_state
from energon_lite.loading.saved_states import merged, redistributed
from tests.core.laws.content_encoders import Content
from tests.testing import blend_of, train_loader

LIMIT = 4096
PACKED_GROUPS = Content(packing=7, groups=2, batch_size=2, late=True)


@pytest.fixture
def hundred(leaf_of: Any) -> dict[str, Any]:
    """A blend of 100 leaves."""
    return blend_of((leaf_of(5 + number % 7, "a"), 1 + number / 7) for number in range(100))


def check(loader: Any, state: Any, tmp_path: Path, limit: int = LIMIT) -> None:
    """Its size and its kind."""
    text = json.dumps(state)
    assert len(text) <= limit
    assert json.loads(text) == state == msgpack.unpackb(msgpack.packb(state))
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    loader.restore_state_rank(json.loads(text))
    assert loader.save_state_rank() == state


@pytest.mark.parametrize(("packs", "world"), [(True, 1), (True, 8), (False, 16)])
def test_a_hundred_leaves(hundred: Any, tmp_path: Path, packs: bool, world: int) -> None:
    arguments: Any = {"chunk_size": 21, "lanes": 64, **PACKED_GROUPS.arguments()} if packs else {"batch_size": 128}
    arguments |= {"shuffle_buffer_size": 100_000, "max_samples_per_sequence": 10_000, "seed_offset": 123456}
    with train_loader(hundred, 2, rank=world - 1, world_size=world, **arguments) as loader:
        times = []
        for _ in zip(range(40 if packs else 20), loader, strict=False):  # workers are busy
            start = time.thread_time()
            state: Any = loader.save_state_rank()
            times.append(time.thread_time() - start)
        assert min(times) < 1e-3
        check(loader, state, tmp_path, LIMIT if packs else 1024)
        if not packs:
            check(loader, state | {"position": 10**15}, tmp_path, 1024)
            return
        assert len(state["cursors"]) == 64 // world
        # Far into the run, in the middle of all chunks.
        lanes = [[row[0], row[0] + 64 * 10**9, [14, 0, 2, 0, 3, 1]] for row in state["cursors"]]
        check(loader, state | {"position": 10**12, "cursors": lanes}, tmp_path)
        if world == 1:
            assert merged(redistributed(state, 16)) == state


def test_after_a_rebase_of_a_hundred_leaves(hundred: Any, tmp_path: Path) -> None:
    """With more than a billion samples of each leaf behind it."""
    changed = json.loads(json.dumps(hundred))
    changed["splits"]["train"]["blend"][7]["weight"] = 50
    old, new = (train_loader(blend, batch_size=128) for blend in (hundred, changed))
    state, report = rebase_state((old.save_state_rank() or {}) | {"position": 10**10}, old.dataset, new.dataset)
    assert {leaf.change for leaf in report.leaves} == {"stays"} and min(one.shown for one in report.leaves) > 10**9
    check(new, state, tmp_path)
