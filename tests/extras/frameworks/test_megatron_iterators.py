"""Iterators for Megatron, without Megatron: passes, places by counts, states in its files; and Bridge as installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import (
    ByTokens,
    Capacity,
    DefaultTaskEncoder,
    Greedy,
    WorkerConfig,
    get_train_dataset,
    get_val_dataset,
)
from energon_lite.errors import StateError, StateMismatchError, UsageError
from energon_lite.extras.frameworks.megatron import DataIterator, data_iterators, worker_config
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.testing import ALONE, val_loader


def keys(batches: Any, count: int) -> list[list[str]]:
    return [next(batches).__key__ for _ in range(count)]


def test_a_pass_ends_or_begins_again(leaf_of: Callable[..., Path]) -> None:
    loader = val_loader(leaf_of(5), batch_size=2)
    expected = [["a-0", "a-1"], ["a-2", "a-3"], ["a-4"]]
    finite = DataIterator(loader, cyclic=False)
    assert len(finite) == 3
    assert keys(finite, 3) == expected
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(finite)
    assert [batch.__key__ for batch in finite] == expected
    assert [batch.__key__ for batch in finite] == expected

    cyclic = DataIterator(loader)
    assert keys(cyclic, 7) == [*expected, *expected, expected[0]]
    assert next(iter(cyclic)).__key__ == expected[1]


def test_a_pass_without_batches_is_an_error_and_no_endless_loop(leaf_of: Callable[..., Path]) -> None:
    class Nothing(DefaultTaskEncoder):
        def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
            return []

        def pack_selected_samples(self, samples: list[Any]) -> Any:
            return samples[0]

    encoder = Nothing()
    data = get_val_dataset(leaf_of(5), batch_size=8, packing_buffer_size=4, task_encoder=encoder, worker_config=ALONE)
    valid = data_iterators(None, data, micro_batch_size=8)[1]
    with pytest.raises(UsageError, match=r"a pass of .* has no batch"):
        next(valid)


@pytest.mark.parametrize("world", [1, 2])
def test_validation_goes_on_where_the_count_says(world: int, leaf_of: Callable[..., Path]) -> None:
    """Of 9 samples on two ranks: 5 micro-batches, 3 steps a pass, the last of which one rank has nothing to do in."""

    def iterator(rank: int, consumed: int, sets: int = 1, **more: bool) -> Any:
        config = WorkerConfig(rank=rank, world_size=world)
        data = get_val_dataset(leaf_of(9), batch_size=2, worker_config=config)
        run = SimpleNamespace(consumed_valid_samples=consumed, **more)
        made = data_iterators(None, data if sets == 1 else [data] * sets, micro_batch_size=2, progress=run)[1]
        return made if sets == 1 else made[-1]

    for rank in range(world):
        expected = keys(iterator(rank, 0), 14)
        for step in range(7):
            assert keys(iterator(rank, 2 * world * step), 7) == expected[step : step + 7], (rank, step)
            assert keys(iterator(rank, 3 * 2 * world * step, 3), 7) == expected[step : step + 7], (rank, step)
        assert keys(iterator(rank, 60, 3, full_validation=True), 7) == expected[:7]


@pytest.mark.parametrize("world", [1, 3])
def test_batches_by_tokens_go_on_where_the_count_says(
    world: int, leaf_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WebdatasetSource, "column", lambda self, name: np.arange(len(self)) * 37 % 60 + 1)

    def iterator(rank: int, consumed: int, **options: Any) -> Any:
        config = WorkerConfig(rank=rank, world_size=world)
        data = get_train_dataset(leaf_of(31), worker_config=config, batching=Greedy(Capacity(99)), **options)
        run = SimpleNamespace(step=3, consumed_train_samples=consumed)
        return data_iterators(data, micro_batch_size=1, progress=run)[0]

    for options in ({}, {"repeat": False}):  # one stream without end; passes
        for rank in range(world):
            expected = keys(iterator(rank, 0, **options), 40)
            for step in (1, 17, 33):
                assert keys(iterator(rank, world * step, **options), 7) == expected[step : step + 7]


def test_where_hooks_decide_a_count_says_nothing(leaf_of: Callable[..., Path]) -> None:
    batching = ByTokens(Greedy(Capacity(12)), length_column=None, length_field="text")
    data = get_train_dataset(leaf_of(31), worker_config=ALONE, batching=batching)
    run = SimpleNamespace(step=3, consumed_train_samples=33, consumed_valid_samples=3)
    with pytest.raises(UsageError, match="restore a state that was saved there"):
        data_iterators(data, micro_batch_size=1, progress=run)
    train, valid, _ = data_iterators(data, data, micro_batch_size=1)
    following = keys(train, 3)
    assert keys(valid, 3) == following
    assert keys(data_iterators(None, data, micro_batch_size=1, progress=run)[1], 3) == following


def test_states_are_looked_for_where_megatron_puts_them(tmp_path: Path, leaf_of: Callable[..., Path]) -> None:
    data = get_train_dataset(leaf_of(31), batch_size=2, worker_config=ALONE)
    train = data_iterators(data, micro_batch_size=2)[0]
    keys(train, 4)
    file = tmp_path / "iter_0000002" / "mp_rank_00_000_003" / "train_dataloader_dprank000.pt"
    file.parent.mkdir(parents=True)
    torch.save({"dataloader_state_dict": train.save_state()}, file)
    following = keys(train, 3)
    for run in (
        SimpleNamespace(iteration=2, consumed_train_samples=8),
        SimpleNamespace(step=2, consumed_train_samples=8),  # Bridge's word for it
        SimpleNamespace(iteration=1, consumed_train_samples=8),  # no file: the count
    ):
        found = data_iterators([data, None, data], micro_batch_size=2, progress=run, states=tmp_path)[0]
        assert keys(found[0], 3) == keys(found[2], 3) == following and found[1] is None

    wrong = SimpleNamespace(iteration=2, consumed_train_samples=10)
    with pytest.raises(StateMismatchError, match="the saved loader is at micro-batch 4, but the run is at 5"):
        data_iterators(data, micro_batch_size=2, progress=wrong, states=tmp_path)
    with pytest.raises(UsageError, match="10 consumed samples do not fill micro-batches of 3"):
        data_iterators(data, micro_batch_size=3, progress=wrong)

    file.write_bytes(file.read_bytes()[:300])
    run = SimpleNamespace(iteration=2, consumed_train_samples=8)
    with pytest.raises(StateError, match=r"train_dataloader_dprank000\.pt"):
        data_iterators(data, micro_batch_size=2, progress=run, states=tmp_path)
    assert data_iterators(data, micro_batch_size=2, progress=None, states=tmp_path)[0] is not None


def test_without_the_package_its_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(UsageError, match=r"energon-lite\[megatron\]"):
        worker_config()


@pytest.mark.slow
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("megatron", "megatron.core", "megatron.bridge")),
    reason="megatron-bridge is not installed: pip install --no-deps megatron-core==0.16.1 megatron-bridge==0.3.1",
)
def test_its_provider_runs_over_our_names_and_ours_is_saved_and_resumed(
    tmp_path: Path, leaf_of: Callable[..., Path]
) -> None:
    program = [sys.executable, "-m", "tests.extras.frameworks.bridge_run", str(leaf_of(12)), str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["flags"] == [True, True, True]
    assert sorted(key for keys in found["theirs"] for key in keys) == sorted(f"a-{number}" for number in range(12))
    assert found["again"] == found["theirs"]
    assert found["their validation"] == [2, 2]
    # It hands on a generator, which has no state; so its own provider cannot be resumed, over whichever library.
    assert "Could not find a save_state" in found["their saving"]

    assert (tmp_path / "iter_0000003" / "train_dataloader_dprank000.pt").exists()
    expected, resumed = found["ours"]
    assert resumed == expected
    assert found["our validation"] == [["a-0", "a-1"], ["a-2", "a-3"]]
