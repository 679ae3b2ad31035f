"""Hugging Face Accelerate takes the loader as its own: kills, other processes, accumulation, validation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches
from accelerate.utils import DataLoaderConfiguration

from energon_lite import WorkerConfig, get_savable_loader
from energon_lite.errors import UsageError
from energon_lite.extras.frameworks.accelerate import AccelerateLoader
from tests.extras.frameworks.framework_runs import (
    SAMPLES,
    Model,
    expected,
    log_line,
    micro_batches,
    numbers_of,
    reached,
    run_processes,
    train_data,
    val_data,
)
from tests.testing import ALONE, take

Leaf = Callable[[int, str], Path]


def train(leaf: Path, folder: Path, tag: str, steps: int, *, packed: bool = False, every: int = 3) -> int:
    """Save every few steps, begin at the newest checkpoint that is whole; how many batches were read."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    config = WorkerConfig.default_worker_config(num_workers=0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, AccelerateLoader(train_data(leaf, config, packed=packed))
    )
    assert isinstance(loader, AccelerateLoader)
    found = [int(path.name[:-5]) for path in folder.glob("*.done")]
    step = max(found, default=0)
    if step:
        accelerator.load_state(str(folder / str(step)))
    for batch in loader:
        if step == steps:
            break
        log_line(folder / f"{tag}-{config.rank}", step=step, rank=config.rank, numbers=numbers_of(batch))
        accelerator.backward(model(batch["number"], batch["labels"])["loss"])
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % every == 0:
            accelerator.save_state(str(folder / str(step)))
            accelerator.wait_for_everyone()
            (folder / f"{step}.done").touch()
    return int(loader.batches.loader.stats()["batches"])


@pytest.mark.parametrize("packed, resumed_on", [(False, 3), pytest.param(True, 1, id="packed-1")])
def test_killed_on_two_processes_and_resumed_on_others(
    packed: bool, resumed_on: int, tmp_path: Path, leaf_of: Leaf
) -> None:
    leaf = leaf_of(SAMPLES, "hf")
    run = partial(train, leaf, tmp_path, packed=packed)

    run_processes(2, partial(run, "killed", 10_000), tmp_path, kill_when=reached(tmp_path, "killed-0", 10))
    first = max(int(path.name[:-5]) for path in tmp_path.glob("*.done"))
    read = run_processes(resumed_on, partial(run, "resumed", first + 6), tmp_path)
    assert set(read) == {7}  # one more than steps: that on which the loop ends
    seen = micro_batches(tmp_path, "killed", before=first) + micro_batches(tmp_path, "resumed")
    assert len(seen) == 2 * first + 6 * resumed_on and seen == expected(leaf, len(seen), packed=packed)


def validate(leaf: Path) -> list[int]:
    """What a validation gathers, after one that was left early."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(AccelerateLoader(val_data(leaf, WorkerConfig.default_worker_config(num_workers=0))))
    next(iter(loader))
    seen: list[int] = []
    for batch in loader:
        seen += accelerator.gather_for_metrics(batch["labels"]).tolist()
    return seen


@pytest.mark.parametrize("samples", [SAMPLES, 3])
def test_a_validation_gathers_each_sample_once(samples: int, leaf_of: Leaf, tmp_path: Path) -> None:
    """Three ranks; of three samples the first one has all."""
    found = run_processes(3, partial(validate, leaf_of(samples, "hf")), tmp_path)
    assert [sorted(seen) for seen in found] == [list(range(samples))] * 3


@pytest.mark.parametrize("packed", [False, True])
def test_the_last_batch_of_a_pass_ends_an_accumulation(packed: bool, leaf_of: Leaf) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    data = train_data(leaf_of(SAMPLES, "hf"), ALONE, repeat=False, packed=packed)
    model, loader = accelerator.prepare(Model(), AccelerateLoader(data))
    for _ in range(2):
        synchronised = []
        for _ in loader:
            with accelerator.accumulate(model):
                synchronised.append(accelerator.sync_gradients)
        count = len(synchronised)
        assert synchronised == [number % 4 == 0 or number == count for number in range(1, count + 1)]
    assert count == 13 or packed


def test_batches_that_were_taken_ahead_come_again(leaf_of: Leaf) -> None:
    """Of a pass of unknown length, one batch is taken ahead: neither a loop that is left nor a state loses it."""
    leaf = leaf_of(SAMPLES, "hf")
    Accelerator(cpu=True)
    loader = AccelerateLoader(get_savable_loader(train_data(leaf, ALONE, repeat=False, packed=True)))
    seen = [numbers_of(batch) for batch in take(loader, 2)]
    state = loader.state_dict()
    seen += [numbers_of(batch) for batch in take(loader, 2)]
    everything = expected(leaf, 4, repeat=False, packed=True)
    assert seen == everything
    loader.load_state_dict(state)
    assert numbers_of(next(iter(loader))) == everything[2]
    loader.close()


def test_what_accelerate_looks_for_behind_a_loader(leaf_of: Leaf) -> None:
    Accelerator(cpu=True)
    leaf = leaf_of(SAMPLES, "hf")
    loader = AccelerateLoader(train_data(leaf, ALONE))
    assert (len(loader), len(loader.dataset)) == (13, SAMPLES)
    assert len(AccelerateLoader(val_data(leaf, ALONE)).dataset) == SAMPLES
    skipping = iter(skip_first_batches(loader, 3))
    assert numbers_of(next(skipping)) == expected(leaf, 4)[3]
    with pytest.raises(UsageError, match="the trainer's data is a list"):
        AccelerateLoader([])  # type: ignore[arg-type]
