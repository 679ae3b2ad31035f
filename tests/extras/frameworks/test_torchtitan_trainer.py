"""torchtitan's own Trainer, Validator and checkpoints with the adapter, on gloo. Skipped where it is not installed."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite.extras.frameworks.torchtitan import TitanLoader, data_loader
from tests.extras.frameworks import titan_trainer
from tests.extras.frameworks.titan_data import train, train_unmeasured, validate
from tests.extras.frameworks.titan_trainer import Run, run
from tests.trainer.parallel.rank_processes import RankFailure, run_ranks

pytestmark = pytest.mark.slow

STEPS, MICRO_BATCHES = 6, 24
SAMPLES = 50  # of validation
ASKED = {"tokenizer": None, "seq_len": 48, "local_batch_size": 1}


@pytest.fixture(scope="module", autouse=True)
def torchtitan() -> Iterator[None]:
    titan_trainer.import_trainer()
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # imports torch's compiler once, not in each rank
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    yield
    logging.disable(level)


def run_on(world: int, folder: Path, *, workers: int = 0, make: Any = train, **options: Any) -> list[Run]:
    """A run of the debug model on so many ranks, or the next part of one."""
    loaders = {
        "train": data_loader(make, dataset_path="titan://200", num_workers=workers),
        "validate": data_loader(validate, dataset_path=f"titan://{SAMPLES}", num_workers=workers),
    }
    options = {"steps": STEPS, "micro_batches": MICRO_BATCHES} | loaders | options
    folder.mkdir(exist_ok=True)
    return run_ranks(world, lambda rank: run(rank, folder, **options), folder=folder, timeout=300)


def step_of(ranks: list[Run], step: int) -> list[list[str]]:
    """The packs of a step, by the keys of their samples, over all ranks."""
    return sorted(keys for rank in ranks for keys in rank.keys[step])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    return run_on(2, tmp_path_factory.mktemp("undisturbed"))


def test_two_ranks_then_three_then_eight(undisturbed: list[Run], tmp_path: Path) -> None:
    """Packed and with pictures: in every step the samples that two ranks would have had, in the same packs."""
    for world, until in ((2, 2), (3, 4), (8, 6)):
        ranks = run_on(world, tmp_path, until=until)
        assert sorted(ranks[0].losses) == sorted(ranks[-1].keys) == [until - 1, until]
        for step in (until - 1, until):
            assert step_of(ranks, step) == step_of(undisturbed, step)
            exact = 0.0 if world == 2 else 2e-6
            assert abs(ranks[0].losses[step] - undisturbed[0].losses[step]) <= exact
        # Validation of 13 packs: each sample once, and as many steps on all ranks.
        for number in range(len(ranks[0].validated)):
            steps = [rank.validated[number] for rank in ranks]
            assert {len(packs) for packs in steps} == {-(-13 // world)}
            keys = [int(key) for packs in steps for pack in packs for key in pack]
            assert sorted(keys) == list(range(SAMPLES))
        assert ranks[0].validation_losses[-1] == pytest.approx(undisturbed[0].validation_losses[until // 2], abs=2e-6)


@pytest.mark.parametrize("world", [2, 3])
def test_kill_9_in_the_middle_of_a_step(world: int, undisturbed: list[Run], tmp_path: Path) -> None:
    """With workers. What came after the last checkpoint is seen again, and nothing else."""

    def killed(step: int) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailure):
        run_on(2, tmp_path, workers=2, on_step=killed)
    ranks = run_on(world, tmp_path, workers=2)
    assert sorted(ranks[0].losses) == [5, 6]
    for step in (5, 6):
        assert step_of(ranks, step) == step_of(undisturbed, step)
        difference = ranks[0].losses[step] - undisturbed[0].losses[step]
        assert difference == 0.0 if world == 2 else abs(difference) <= 2e-6


def test_lanes_and_asynchronous_checkpoints(tmp_path: Path) -> None:
    """Lengths that nobody has measured, from two ranks to three, by torchtitan's other way of saving."""
    options: Any = {"make": train_unmeasured, "steps": 4, "validate": None, "async_mode": "async"}
    whole = run_on(2, tmp_path / "whole", **options, until=4)
    first = run_on(2, tmp_path / "parts", **options, until=2)
    then = run_on(3, tmp_path / "parts", **options, until=4)
    for part, steps in ((first, (1, 2)), (then, (3, 4))):
        for step in steps:
            assert step_of(part, step) == step_of(whole, step)


# -- the configuration, and what its own tests ask of a data loader ---------------------------------------------------


def config_of(**options: Any) -> Any:
    return data_loader(train, **{"dataset_path": "titan://70", "num_workers": 0} | options)


def test_it_is_a_component_of_theirs() -> None:
    from torch.distributed.checkpoint.stateful import Stateful
    from torchtitan.components.dataloader import BaseDataLoader

    config = config_of(seed=3)
    assert isinstance(config, BaseDataLoader.Config)
    loader = replace(config, infinite=False).build(dp_world_size=4, dp_rank=3, snapshot_every_n_steps=2, **ASKED)
    assert isinstance(loader, BaseDataLoader) and isinstance(loader, TitanLoader) and isinstance(loader, Stateful)
    asked = loader.request
    assert (asked.worker_config.rank, asked.worker_config.world_size, asked.worker_config.seed_offset) == (3, 4, 3)
    assert (asked.seq_len, asked.local_batch_size, asked.infinite) == (48, 1, False)
    assert asked.others == {"snapshot_every_n_steps": 2}
    assert json.loads(json.dumps(config.to_dict()))["dataset_path"] == "titan://70"


def test_options_of_their_command_line() -> None:
    import tyro
    from torchtitan.config.manager import custom_registry
    from torchtitan.models.llama3 import config_registry
    from torchtitan.trainer import Trainer

    config = replace(config_registry.llama3_debugmodel(), dataloader=config_of())
    given = ["--dataloader.num_workers", "3", "--dataloader.dataset-path", "titan://9", "--dataloader.seed", "5"]
    parsed = tyro.cli(Trainer.Config, args=given, default=config, registry=custom_registry).dataloader
    assert (parsed.num_workers, parsed.dataset_path, parsed.seed, parsed.make) == (3, "titan://9", 5, train)
