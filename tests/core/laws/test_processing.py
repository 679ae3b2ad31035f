"""Jobs over data: each sample exactly once, over any ranks and workers, cut anywhere on each rank by itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import (
    SkipSample,
    TaskEncoder,
    WorkerConfig,
    get_processing_dataset,
    get_savable_loader,
    get_val_dataset,
)
from energon_lite.errors import StateMismatchError, UsageError
from energon_lite.loading import get_processing_datasets
from tests.testing import ALONE, examples


class Once(TaskEncoder):
    """Leaves out each fifth sample, fails at each seventh; may make two of each other."""

    failure_tolerance = 0

    def encode_sample(self, sample: Any) -> Any:
        number = int(sample.__key__.partition("-")[2])
        if number % 5 == 4:
            raise SkipSample("each fifth")
        if number % 7 == 6:
            raise ValueError("each seventh")
        return {"__key__": sample.__key__, "drawn": float(self.rng.random())}


class Twice(Once):
    def encode_sample(self, sample: Any) -> Iterator[Any]:  # type: ignore[override]
        made = super().encode_sample(sample)
        yield {**made, "__key__": f"{made['__key__']}-0"}
        yield {**made, "__key__": f"{made['__key__']}-1"}


def document(leaf_of: Callable[..., Path], sizes: list[int]) -> dict[str, Any]:
    blend = [
        {"path": str(leaf_of(size, "abc"[number])), "weight": 3 - number} for number, size in enumerate(sizes) if size
    ]
    return {"splits": {"train": {"blend": blend}}}


def expected(sizes: list[int], twice: bool) -> Counter[str]:
    kept = [
        f"{'abc'[leaf]}-{number}"
        for leaf, size in enumerate(sizes)
        for number in range(size)
        if number % 5 != 4 and number % 7 != 6
    ]
    return Counter(f"{key}-{part}" for key in kept for part in (0, 1)) if twice else Counter(kept)


def keys_of(batch: Any) -> list[str]:
    key = batch["__key__"]
    return [key] if isinstance(key, str) else list(key)


@settings(max_examples=examples(30))
@given(
    sizes=st.sampled_from([[13, 7], [50], [1], [3, 13, 2], [7, 50]]),
    world=st.integers(1, 5),
    workers=st.sampled_from([0, 0, 0, 0, 1, 2]),
    size=st.sampled_from([None, None, 1, 3, 8]),
    cuts=st.lists(st.integers(0, 12), min_size=5, max_size=5),
    twice=st.booleans(),
)
def test_each_sample_once_cut_anywhere(
    leaf_of: Callable[..., Path],
    sizes: list[int],
    world: int,
    workers: int,
    size: int | None,
    cuts: list[int],
    twice: bool,
) -> None:
    found, left_out, states = Counter[str](), 0, []
    for rank in range(world):
        state: Any = None
        for cut in (cuts[rank], None):
            config = WorkerConfig(rank=rank, world_size=world, num_workers=workers)
            encoder = Twice() if twice else Once()
            dataset = get_processing_dataset(
                document(leaf_of, sizes), batch_size=size, task_encoder=encoder, worker_config=config
            )
            with get_savable_loader(dataset).with_restored_state_rank(state) as loader:
                for number, batch in enumerate(loader, 1):
                    assert batch is not None and keys_of(batch)
                    found.update(keys_of(batch))
                    if number == cut:
                        break
                state = json.loads(json.dumps(loader.save_state_rank()))
                if cut is None:
                    assert list(loader) == []  # there is one pass, and no more
                left_out += sum(loader.stats()[kind] for kind in ("skipped", "failed"))
        states.append(state)
    assert found == expected(sizes, twice)
    assert left_out >= sum(sizes) - len(expected(sizes, False))
    with get_savable_loader(dataset).with_restored_state_rank(states[-1]) as loader:
        assert list(loader) == []


def test_ranks_in_step_go_on_on_others(leaf_of: Callable[..., Path]) -> None:
    def loader(rank: int, world: int) -> Any:
        config = WorkerConfig(rank=rank, world_size=world)
        return get_savable_loader(get_processing_dataset(leaf_of(50), batch_size=3, worker_config=config))

    begun = [loader(rank, 2) for rank in range(2)]
    found = [key for one in begun for _, batch in zip(range(4), one, strict=False) for key in batch.__key__]
    state = begun[0].save_state_rank()
    assert state == begun[1].save_state_rank()
    for rank in range(3):
        one = loader(rank, 3).with_restored_state_rank(state)
        found += [key for batch in one for key in batch.__key__]
    assert Counter(found) == Counter(f"a-{number}" for number in range(50))
    assert (
        len(loader(0, 3)) == 6 and len(loader(2, 3)) == 5 and [len(list(loader(rank, 3))) for rank in (0, 2)] == [6, 5]
    )


def test_leaves_by_themselves_and_what_is_refused(leaf_of: Callable[..., Path]) -> None:
    pairs = get_processing_datasets(document(leaf_of, [13, 7]), worker_config=ALONE)
    assert [len(list(get_savable_loader(dataset))) for dataset, _ in pairs] == [13, 7]
    assert [Path(spec.path).name for _, spec in pairs] == [leaf_of(13, "a").name, leaf_of(7, "b").name]
    state = get_savable_loader(get_val_dataset(leaf_of(13, "a"), split_part="train", worker_config=ALONE)).state_dict()
    with pytest.raises(StateMismatchError, match="kind: 'val' in the state, 'processing' here"):
        get_savable_loader(pairs[0][0]).restore_state_rank(state)
    with pytest.raises(UsageError, match="has no argument 'shuffle_buffer_size'"):
        get_processing_dataset(leaf_of(13, "a"), shuffle_buffer_size=3, worker_config=ALONE)
