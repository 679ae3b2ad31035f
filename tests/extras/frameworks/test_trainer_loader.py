"""What all adapters hand to trainers: the last step of a pass, its samples, its state."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import make_dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import WorkerConfig, get_processing_dataset, get_val_dataset
from energon_lite.batching.collate import with_rows
from energon_lite.errors import TopologyError
from energon_lite.extras.energon import GcDataset
from energon_lite.extras.frameworks.trainer_loader import TrainerLoader
from tests.extras.frameworks.framework_runs import Numbers, expected, numbers_of, train_data, val_data
from tests.testing import ALONE, examples, take

Pair, Named = make_dataclass("Pair", ["left", "right"]), namedtuple("Named", "value")


def loaders(leaf: Path, ranks: int, make: Any = val_data) -> list[TrainerLoader]:
    return [
        TrainerLoader(make(leaf, WorkerConfig(rank=rank, world_size=ranks)), rank=rank, world_size=ranks)
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("samples", [3, 4, 5, 11, 12, 13, 24])
def test_each_rank_has_as_many_rows_and_the_first_ones_are_the_samples(
    samples: int, leaf_of: Callable[..., Path]
) -> None:
    """Three ranks, batches of four."""
    ranks = loaders(leaf_of(samples, "hf"), 3)
    for _ in range(2):
        seen: list[int] = []
        for step in zip(*ranks, strict=True):
            assert [len(batch["labels"]) for batch in step] == [4] * 3
            assert [batch["unused"] for batch in step] == [["text"] * 4] * 3
            rows = [number for batch in step for number in numbers_of(batch)]
            seen += rows[: ranks[0].remainder] if ranks[0].at_end and ranks[0].remainder else rows
        assert seen == list(range(samples))
    assert {loader.samples for loader in ranks} == {samples}
    assert {loader.remainder for loader in ranks} == {samples % 12}


def test_a_limit_counts_as_the_end(leaf_of: Callable[..., Path]) -> None:
    def limited(leaf: Path, config: WorkerConfig) -> Any:
        return get_val_dataset(leaf, batch_size=4, limit=2, worker_config=config)

    (loader,) = loaders(leaf_of(26, "hf"), 1, limited)
    assert (len(list(loader)), loader.samples, loader.remainder) == (2, 8, 0)


def test_validation_begins_anew_also_inside_of_wrappers(leaf_of: Callable[..., Path]) -> None:
    leaf = leaf_of(26, "hf")
    processing = get_processing_dataset(leaf, batch_size=4, worker_config=ALONE, task_encoder=Numbers())
    validation = val_data(leaf, ALONE)
    cases = {validation: True, GcDataset(validation): True, processing: False, train_data(leaf, ALONE): False}
    for data, begins_anew in cases.items():
        loader = TrainerLoader(data, rank=0, world_size=1)
        first, second = ([numbers_of(batch) for batch in take(loader, 2)] for _ in range(2))
        assert (first == second) == loader.starts_over == begins_anew


def test_a_pass_that_is_resumed_on_other_ranks(leaf_of: Callable[..., Path]) -> None:
    """Five of thirteen batches were seen by one rank; eight are left for three."""
    leaf, passes = leaf_of(26, "hf"), partial(train_data, repeat=False)
    (alone,) = loaders(leaf, 1, passes)
    take(alone, 5)
    ranks = loaders(leaf, 3, passes)
    for rank in ranks:
        rank.load_state_dict(alone.state_dict())
    assert {rank.remainder for rank in ranks} == {4}
    seen = [numbers_of(batch) for step in zip(*ranks, strict=True) for batch in step]
    assert seen[:8] == expected(leaf, 13, repeat=False)[5:] and len(seen) == 9
    assert {rank.remainder for rank in ranks} == {2}  # of the pass that follows


@settings(max_examples=examples(40))
@given(
    kind=st.sampled_from(["endless", "ends", "packed", "packed, ends"]),
    parts=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9), st.booleans()), min_size=1, max_size=4),
    ahead=st.integers(0, 2),
)
def test_the_resume_law_holds(leaf_of: Callable[..., Path], kind: str, parts: Any, ahead: int) -> None:
    """Cut anywhere, by a state or by a loop that is left, on any ranks, with batches that were taken and not used."""
    data = {"packed": "packed" in kind, "repeat": "ends" not in kind}
    leaf, seen, state = leaf_of(26, "hf"), list[list[int]](), None
    ranks: list[TrainerLoader] = []
    for number, steps, again in parts:
        world = 1 if data["packed"] or not data["repeat"] else number  # lanes are put together by a process group
        if again or len(ranks) != world:
            ranks = loaders(leaf, world, partial(train_data, **data))
            for rank in ranks if state is not None else []:
                rank.load_state_dict(state)
        found = [[numbers_of(batch) for batch in step] for step in islice(zip(*ranks, strict=True), steps)]
        used = max(0, len(found) - ahead) if again else len(found)
        seen += [numbers for step in found[:used] for numbers in step]
        unused = len(found) - used
        ranks[0].taken_ahead = partial(int, unused)
        state = ranks[0].state_dict()
        ranks[0].taken_ahead = int
        if unused:
            ranks = []  # a trainer that died with them
    assert seen == expected(leaf, len(seen), **data)


def test_what_belongs_to_rows_is_repeated_at_any_depth() -> None:
    batch = Pair({"a": torch.arange(3), "b": ["x", "y", "z"], "c": 7, "d": Pair}, Named((torch.eye(2), [1, 2, 3])))
    found = with_rows(batch, 3, [0, 1, 2, 0, 1])
    assert found.left["a"].tolist() == [0, 1, 2, 0, 1] and found.left["b"] == ["x", "y", "z", "x", "y"]
    assert found.left["c"] == 7 and isinstance(found.right, Named)
    assert found.left["d"] is Pair and len(found.right.value) == 2 and found.right.value[1] == [1, 2, 3]
    assert found.right.value[0].shape == (2, 2)


def test_a_loader_of_another_rank_is_refused(leaf_of: Callable[..., Path]) -> None:
    with pytest.raises(TopologyError, match="made for rank 0 of 1, and this process is rank 1 of 2"):
        TrainerLoader(val_data(leaf_of(5, "hf"), ALONE), rank=1, world_size=2)
