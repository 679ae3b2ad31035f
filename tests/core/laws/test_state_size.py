"""Law 2: a state is plain, below 4 KiB, and saved in under a millisecond, with all that can make it large."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.extras.blends import rebase_state
from energon_lite.loading.saved_states import merged, redistributed

# Test folders are no packages; the helper beside this file is imported by its plain name.
from tests.core.laws.content_encoders import Content
from tests.testing import ALONE

LIMIT = 4096
PACKED_GROUPS = Content(packing=7, groups=2, batch_size=2, late=True)


@pytest.fixture
def hundred(leaf_of: Any) -> dict[str, Any]:
    """A blend of 100 leaves."""
    blend = [{"path": str(leaf_of(5 + number % 7, "a")), "weight": 1 + number / 7} for number in range(100)]
    return {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": {"blend": blend}}}


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
    config = WorkerConfig(rank=world - 1, world_size=world, num_workers=2, seed_offset=123456)
    arguments = {"chunk_size": 21, "lanes": 64, **PACKED_GROUPS.arguments()} if packs else {"batch_size": 128}
    dataset = get_train_dataset(
        hundred, worker_config=config, shuffle_buffer_size=100_000, max_samples_per_sequence=10_000, **arguments
    )
    with get_savable_loader(dataset) as loader:
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

    def build(blend: Any) -> Any:
        return get_train_dataset(blend, batch_size=128, worker_config=ALONE)

    new = json.loads(json.dumps(hundred))
    new["splits"]["train"]["blend"][7]["weight"] = 50
    state = get_savable_loader(build(hundred)).save_state_rank() or {}
    state, report = rebase_state(state | {"position": 10**10}, build(hundred), build(new))
    assert {leaf.change for leaf in report.leaves} == {"stays"} and min(one.shown for one in report.leaves) > 10**9
    check(get_savable_loader(build(new)), state, tmp_path)
