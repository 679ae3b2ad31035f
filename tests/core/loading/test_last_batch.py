"""Whether the batch in hand is the last one of its loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    SavableDataLoader,
    TaskEncoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from tests.testing import ALONE


class Groups(TaskEncoder):
    """Batches of what comes: hooks decide how many there are."""

    def batch_group_criterion(self, sample: Any) -> tuple[str, int]:
        return sample.__key__[-1], 2


def said(loader: SavableDataLoader) -> list[bool | None]:
    """What is said after each batch of a loop."""
    with loader:
        return [loader.is_last() for _ in loader]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_pass_that_ends(rank: int, leaf_of: Callable[..., Path]) -> None:
    """14 samples in batches of two are three steps on three ranks; in the last one the third rank has none."""
    config = WorkerConfig(rank=rank, world_size=3)
    loader = get_savable_loader(get_val_dataset(leaf_of(14, "a"), batch_size=2, worker_config=config))
    assert said(loader) == [False, False, True]
    assert said(loader) == [False, False, True]
    skipping = get_savable_loader(loader.dataset, skip_steps=[2])
    assert said(skipping) == [False, True]
    next(iter(loader))
    state = loader.state_dict()
    loader.restore_state_rank(state)
    assert said(loader) == [False, True]


def test_an_endless_stream_ends_with_its_virtual_epoch(leaf_of: Callable[..., Path]) -> None:
    options: dict[str, Any] = {"batch_size": 2, "worker_config": ALONE}
    loader = get_savable_loader(get_train_dataset(leaf_of(14, "a"), virtual_epoch_length=4, **options))
    assert said(loader) == said(loader) == [False, False, False, True]
    endless = get_savable_loader(get_train_dataset(leaf_of(14, "a"), **options))
    assert [endless.is_last() for _, _ in zip(range(20), endless, strict=False)] == [False] * 20


def test_nobody_knows_where_hooks_decide(leaf_of: Callable[..., Path]) -> None:
    options: dict[str, Any] = {"batch_size": None, "worker_config": ALONE, "task_encoder": Groups()}
    loader = get_savable_loader(get_train_dataset(leaf_of(14, "a"), repeat=False, **options))
    assert set(said(loader)) == {None}
    counted = get_savable_loader(get_train_dataset(leaf_of(14, "a"), virtual_epoch_length=2, **options))
    assert said(counted) == [False, True]
