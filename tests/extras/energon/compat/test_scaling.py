"""Energon's rule of reproducible scaling: the same samples in each global batch, however many ranks and workers, and
whatever micro-batches, it is made of. Theirs and ours keep it; each has an order of its own."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest

GLOBAL, STEPS = 8, 4
#: Size of a micro-batch, ranks, workers of each: Energon asks for a constant number of workers in all.
LAYOUTS = [(2, 2, 1), (2, 1, 2), (4, 2, 1)]


def global_batches(energon: Any, root: Path, layout: tuple[int, int, int], steps: int, states: Any = None) -> Any:
    """The keys of each global batch, and the states of all ranks."""
    size, world, workers = layout
    loaders = []
    for rank in range(world):
        config = energon.WorkerConfig(rank=rank, world_size=world, num_workers=workers, seed_offset=3)
        options = {"shuffle_buffer_size": None, "max_samples_per_sequence": None}
        dataset = energon.get_train_dataset(str(root), batch_size=size, worker_config=config, **options)
        loaders.append(energon.get_savable_loader(dataset))
        if states is not None:
            loaders[-1].restore_state_rank(states[rank % len(states)])
    iterators, found = [iter(loader) for loader in loaders], []
    for _ in range(steps):
        steps_of_one = GLOBAL // (size * world)
        found.append({key for _ in range(steps_of_one) for one in iterators for key in next(one).__key__})
    return found, [loader.save_state_rank() for loader in loaders]


@pytest.fixture
def root(tmp_path: Path, tools: Any) -> Path:
    for shard in range(8):
        with tarfile.open(tmp_path / f"s{shard}.tar", "w") as tar:
            for number in range(8 * shard, 8 * shard + 8):
                tools.add(tar, f"{number:03d}.txt", b"text")
    options = ("--split-ratio", "1,0,0", "--sample-type", "TextSample", "--field-map", '{"text": "txt"}')
    tools.energon_prepare(tmp_path, *options)
    return tmp_path


# It takes five seconds to collect each of Energon's loaders with workers.
@pytest.mark.parametrize("library", ["energon_lite", pytest.param("megatron.energon", marks=pytest.mark.nightly)])
def test_each_global_batch_has_the_same_samples(root: Path, library: str) -> None:
    energon = pytest.importorskip(library)
    expected, _ = global_batches(energon, root, LAYOUTS[0], STEPS)
    assert all(len(one) == GLOBAL for one in expected)
    begun, states = global_batches(energon, root, LAYOUTS[0], STEPS // 2)
    smaller, _ = global_batches(energon, root, (1, 2, 1), STEPS // 2, states)
    assert begun + smaller == expected
    for layout in LAYOUTS[1:]:
        assert global_batches(energon, root, layout, STEPS)[0] == expected


def test_larger_micro_batches_and_other_ranks_too(root: Path) -> None:
    import energon_lite

    expected, _ = global_batches(energon_lite, root, LAYOUTS[0], STEPS)
    begun, states = global_batches(energon_lite, root, LAYOUTS[0], STEPS // 2)
    for layout in (*LAYOUTS[1:], (8, 1, 0), (1, 4, 0)):
        more, _ = global_batches(energon_lite, root, layout, STEPS // 2, states)
        assert begun + more == expected


@pytest.mark.nightly
def test_energon_refuses_larger_micro_batches(root: Path) -> None:
    energon = pytest.importorskip("megatron.energon")
    _, states = global_batches(energon, root, LAYOUTS[0], 1)
    with pytest.raises(ValueError, match="larger micro batch"):
        global_batches(energon, root, (4, 2, 1), 1, states)
