"""Lightning's own Trainer with the data module: kills, other numbers of devices, and checkpoints of any moment."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("accelerate")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from energon_lite.errors import UsageError
from energon_lite.extras.frameworks.lightning import EnergonDataModule
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

Leaf = Callable[[int, str], Path]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False}
QUIET |= {"enable_progress_bar": False, "enable_model_summary": False}


class Module(LightningModule):
    """Writes down which samples each step saw."""

    def __init__(self, seen_file: Path, fail_at: int | None = None):
        super().__init__()
        self.model, self.seen_file, self.fail_at = Model(), seen_file, fail_at
        self.validated = list[int]()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        if self.global_step == self.fail_at:
            raise RuntimeError("a step that fails")
        place = {"step": self.global_step, "rank": self.global_rank}
        log_line(Path(f"{self.seen_file}-{self.global_rank}"), **place, numbers=numbers_of(batch))
        return self.model(batch["number"], batch["labels"])["loss"]

    def validation_step(self, batch: Any, _: int, dataloader_idx: int = 0) -> None:
        self.validated += numbers_of(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches  # as schedules do; Lightning takes the loader for it
        return torch.optim.SGD(self.parameters(), 1e-3)


class Late(SingleDeviceStrategy):
    """Restores checkpoints when the optimizers are there, as FSDP does."""

    restore_checkpoint_after_setup = True


def train(
    leaf: Path,
    folder: Path,
    tag: str,
    *,
    devices: int = 1,
    resume: str | None = None,
    data: Any = None,
    every: int = 1,
    fail_at: int | None = None,
    val: bool = False,
    late: bool = False,
    **given: Any,
) -> tuple[int, int, int, list[int]]:
    """A run; what it saw is in ``tag-RANK``."""
    module = Module(folder / tag, fail_at)
    saves = ModelCheckpoint(folder / "saved", filename="{step}", every_n_train_steps=every, save_top_k=-1)
    given |= QUIET | {"devices": devices, "strategy": Late("cpu") if late else "ddp" if devices > 1 else "auto"}
    trainer = Trainer(callbacks=[saves, OnExceptionCheckpoint(folder)], default_root_dir=folder, **given)
    module_of_data = EnergonDataModule(
        lambda config: train_data(leaf, config, **(data or {})),
        (lambda config: val_data(leaf, config)) if val else None,
        num_workers=0,
    )
    trainer.fit(module, module_of_data, ckpt_path=resume)
    trainer.save_checkpoint(folder / "saved" / "after.ckpt")
    read = module_of_data.train_dataloader().loader.stats()["batches"]
    return trainer.global_step, trainer.current_epoch, read, module.validated


def test_killed_on_two_devices_and_resumed_on_three(tmp_path: Path, leaf_of: Leaf) -> None:
    """In the middle of an epoch: of 7 batches on two devices, of 5 on three."""
    leaf = leaf_of(SAMPLES, "hf")

    killed = partial(train, leaf, tmp_path, "killed", devices=2, max_steps=10_000, every=5)
    run_processes(2, killed, tmp_path, kill_when=reached(tmp_path, "killed-0", 12))
    saved = str(tmp_path / "saved" / "step=10.ckpt")
    given: dict[str, Any] = {"max_steps": 18, "max_epochs": 1000, "resume": saved}
    found = run_processes(3, partial(train, leaf, tmp_path, "again", devices=3, **given), tmp_path)
    assert [(step, read) for step, _, read, _ in found] == [(18, 8)] * 3  # nothing was read to be skipped
    seen = micro_batches(tmp_path, "killed", before=10) + micro_batches(tmp_path, "again")
    assert len(seen) == 20 + 24 and seen == expected(leaf, 44)
    # 20 micro-batches are one epoch of 14 and 6 of the next one, which three devices count as two of five batches.
    assert {epoch for _, epoch, *_ in found} == {1 + (2 + 8) // 5}


@pytest.mark.nightly
def test_packed_data_goes_on_on_other_devices(tmp_path: Path, leaf_of: Leaf) -> None:
    """Nobody knows how many batches there are, and each device has lanes of its own."""
    leaf, data = leaf_of(SAMPLES, "hf"), {"packed": True}
    run_processes(2, partial(train, leaf, tmp_path, "first", devices=2, max_steps=7, data=data), tmp_path)
    saved = str(tmp_path / "saved" / "step=5.ckpt")
    run_processes(3, partial(train, leaf, tmp_path, "again", devices=3, max_steps=9, resume=saved, data=data), tmp_path)
    seen = micro_batches(tmp_path, "first", before=5) + micro_batches(tmp_path, "again")
    assert len(seen) == 10 + 12 and seen == expected(leaf, 22, packed=True)


@pytest.mark.nightly
@pytest.mark.parametrize("step", [3, 10])
def test_a_pass_that_ends_comes_to_its_end_on_other_devices(step: int, tmp_path: Path, leaf_of: Leaf) -> None:
    leaf, data = leaf_of(SAMPLES, "hf"), {"repeat": False}
    run_processes(2, partial(train, leaf, tmp_path, "first", devices=2, max_steps=step, data=data), tmp_path)
    saved = str(tmp_path / "saved" / f"step={step}.ckpt")
    run_processes(1, partial(train, leaf, tmp_path, "again", max_epochs=3, resume=saved, data=data), tmp_path)
    passes = expected(leaf, 39, **data)
    done = step * 2 - (step > 7)  # of the 14 that two devices make of a pass, one is a copy
    assert micro_batches(tmp_path, "again") == passes[done:]


@pytest.mark.parametrize(
    "packed, repeat, step, late",
    [
        (False, True, 5, True),
        (False, True, 13, False),
        (False, False, 13, False),
        (False, False, 20, False),
        (True, True, 4, True),
    ],
)
def test_any_checkpoint_goes_on_behind_its_batch(
    packed: bool, repeat: bool, step: int, late: bool, tmp_path: Path, leaf_of: Leaf
) -> None:
    """Also at the end of an epoch, where Lightning by itself leaves the loader's state alone, and after the fit."""
    leaf, given = leaf_of(SAMPLES, "hf"), {"data": {"packed": packed, "repeat": repeat}, "late": late}
    length = {"max_steps": 16} if packed else {"max_epochs": 3}
    train(leaf, tmp_path, "first", **given, **length)
    first = micro_batches(tmp_path, "first")
    assert first == expected(leaf, 16 if packed else 39, **given["data"])
    saved = tmp_path / "saved"
    after = shutil.copy(saved / "after.ckpt", tmp_path)
    train(leaf, tmp_path, "again", resume=str(saved / f"step={step}.ckpt"), **given, **length)
    assert micro_batches(tmp_path, "again") == first[step:]
    train(leaf, tmp_path, "more", resume=after, **given, max_steps=len(first) + 2)
    assert micro_batches(tmp_path, "more") == expected(leaf, len(first) + 2, **given["data"])[-2:]


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_whose_step_failed_comes_again(packed: bool, tmp_path: Path, leaf_of: Leaf) -> None:
    leaf, data = leaf_of(SAMPLES, "hf"), {"packed": packed}
    with pytest.raises(RuntimeError, match="a step that fails"):
        train(leaf, tmp_path, "one", data=data, fail_at=6, max_steps=10)
    train(leaf, tmp_path, "one", data=data, resume=str(tmp_path / "on_exception.ckpt"), max_steps=10)
    assert micro_batches(tmp_path, "one") == expected(leaf, 10, packed=packed)


def test_validations_begin_at_the_first_sample_and_leave_the_training_alone(tmp_path: Path, leaf_of: Leaf) -> None:
    """The sanity check looks at two batches only; accumulation takes three batches a step."""
    leaf = leaf_of(SAMPLES, "hf")
    given = {"val": True, "val_check_interval": 6, "max_steps": 4, "accumulate_grad_batches": 3, "every": 2}
    *_, validated = train(leaf, tmp_path, "first", **given)
    everything = list(range(SAMPLES))
    assert validated == everything[:8] + everything * 2
    assert micro_batches(tmp_path, "first") == expected(leaf, 12)
    given |= {"max_steps": 6}
    train(leaf, tmp_path, "again", resume=str(tmp_path / "saved" / "step=2.ckpt"), **given)
    assert micro_batches(tmp_path, "again") == expected(leaf, len(micro_batches(tmp_path, "again")) + 6)[6:]


def test_several_validations(tmp_path: Path, leaf_of: Leaf) -> None:
    module, several = Module(tmp_path / "one"), {"a": 5, "b": 3}
    data = EnergonDataModule(
        lambda config: train_data(leaf_of(SAMPLES, "hf"), config),
        {name: lambda config, count=count: val_data(leaf_of(count, "hf"), config) for name, count in several.items()},
        num_workers=0,
    )
    trainer = Trainer(**QUIET, enable_checkpointing=False)
    for _ in range(2):
        trainer.validate(module, data)
    assert module.validated == [*range(5), *range(3)] * 2
    assert len(data._loaders) == 2  # those of the first time, and their workers, are gone


def test_a_data_module_needs_a_trainer(leaf_of: Leaf) -> None:
    data = EnergonDataModule(lambda config: train_data(leaf_of(SAMPLES, "hf"), config))
    assert data.state_dict() == {}
    with pytest.raises(UsageError, match="no trainer"):
        data.train_dataloader()
