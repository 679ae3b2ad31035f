"""What code for Energon asks a WorkerConfig and a loader, by its names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite import TaskEncoder, WorkerConfig
from energon_lite.errors import UsageError
from tests.testing import take, train_loader


class WhoMadeIt(TaskEncoder):
    """Batches are the numbers of the workers that made them."""

    def batch(self, samples: list[Any]) -> Any:
        config = WorkerConfig(rank=1, world_size=2, num_workers=2)
        return [config.rank_worker_id(), config.global_worker_id()]


def test_workers_have_numbers(leaf_of: Callable[..., Path]) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=2)
    with train_loader(leaf_of(50), batch_size=1, worker_config=config, task_encoder=WhoMadeIt()) as loader:
        made = {tuple(batch) for batch in take(loader, 30)}
    assert made <= {(0, 2), (1, 3)} and made
    assert config.rank_worker_id() == config.worker_id_offset == 0
    config.assert_worker()


def test_what_it_says_of_itself() -> None:
    config = WorkerConfig(rank=1, world_size=4, num_workers=3, worker_log_level=0)
    plain = {"rank": 1, "world_size": 4, "num_workers": 3, "data_parallel_group": None}
    assert json.loads(json.dumps(config.config())) == plain
    assert WorkerConfig(1, 4, 3, None) == config, "by place, as there"
    assert config.global_rank() == 1 and config.global_worker_id(2) == 5
    seeds = {config.worker_seed(number) for number in range(3)}
    other = WorkerConfig(rank=1, world_size=4, num_workers=3, seed_offset=1)
    assert len(seeds) == 3 and other.worker_seed(0) not in seeds and max(seeds) < 1 << 32
    assert config.should_log(0) and not config.should_log(1)


def test_lines_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    WorkerConfig(rank=0, world_size=1).worker_log({"t": "mine"})
    assert json.loads(capsys.readouterr().out) == {"t": "mine"}
    path = str(tmp_path / "logs" / "{worker_id}.jsonl")
    config = WorkerConfig(rank=0, world_size=1, worker_debug_path=path, worker_log_level=1)
    config.worker_log({"t": 1})
    config.worker_log({"t": 2})
    assert (tmp_path / "logs" / "0.jsonl.log").read_text() == '{"t": 1}\n{"t": 2}\n'


def test_being_at_a_sample() -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=2)
    with pytest.raises(UsageError, match="current_sample_index"):
        config.active_worker_sample_index  # noqa: B018
    config.worker_activate(5)
    try:
        assert WorkerConfig.active_worker_config is config
        config.worker_push_sample_index(7)
        assert (config.active_worker_batch_index, config.active_worker_sample_index) == (10, 14)
        assert config.worker_pop_sample_index() == 7
        with pytest.raises(UsageError, match="active already"):
            config.worker_activate(0)
    finally:
        config.worker_deactivate()
    assert WorkerConfig.active_worker_config is None


def test_saving_by_the_names_that_are_given_up(leaf_of: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    loader, again = (train_loader(leaf_of(50), batch_size=2) for _ in range(2))
    batches = iter(loader)
    next(batches)
    state = loader.save_state(dst_rank=0)
    expected = next(batches).__key__

    again.restore_state([state])
    assert next(iter(again)).__key__ == expected
    assert caplog.text.count("is deprecated") == 2
    dataset = loader.dataset
    assert dataset.len_rank() == 25 and dataset.can_restore_sample() and dataset.config() == loader.config()


def test_builders_that_only_call_super_are_passed_over(leaf_of: Callable[..., Path]) -> None:
    class Passing(TaskEncoder):
        def build_batch(self, dataset: Any, *, batch_size: int | None, **more: Any) -> Any:
            """As it is."""
            return super().build_batch(dataset, batch_size=batch_size, **more)  # type: ignore[misc]

    class Building(TaskEncoder):
        def build_batch(self, dataset: Any, **more: Any) -> Any:
            return print(dataset)

    train_loader(leaf_of(50), batch_size=2, task_encoder=Passing())
    with pytest.raises(UsageError, match=r"Building\.build_batch would not be called"):
        train_loader(leaf_of(50), batch_size=2, task_encoder=Building())
