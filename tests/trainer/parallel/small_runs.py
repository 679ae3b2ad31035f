"""Small runs of the trainer: pictures and text, a configuration, and a run that a test may disturb."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from energon_lite.trainer import Trainer, TrainerConfig, config_from_dict
from energon_lite.trainer.checkpointing.files import CheckpointFiles
from tests.conftest import blend_yaml
from tests.testing import TEXT_YAML, errors_of, nightly_but, output_of
from tests.trainer.parallel.rank_processes import RunRanks

WriteDataset = Callable[..., Path]
Disturb = Callable[[Trainer, int], None]
Section = dict[str, Any] | None
Lines = list[dict[str, Any]]
WORDS = ["black", "grey", "white"]
VAL_SAMPLES, TRAIN_SAMPLES = 7, 24

BATCHING: dict[str, dict[str, Any]] = {
    "capacity": {"strategy": "capacity", "capacity": 48},
    "best_fit": {"strategy": "best_fit", "capacity": 40, "open_bins": 4},
    "cost": {"strategy": "best_fit", "capacity": 40, "unit": "cost", "alpha": 64},
}
#: Numbers of ranks, and of what they are.
LAYOUTS = [(1, {}), (2, {"pp": 2}), (2, {"tp": 2}), (2, {})]
EACH_LAYOUT = pytest.mark.parametrize(
    ("world", "mesh"), nightly_but({1}, LAYOUTS), ids=["alone", "pp 2", "tp 2", "dp 2"]
)

CAPTION_YAML = """\
__module__: megatron.energon
__class__: StandardWebdatasetFactory
sample_type: {__module__: megatron.energon, __class__: CaptioningSample}
field_map: {image: png, caption: txt}
"""


def picture(number: int) -> tuple[str, dict[str, bytes]]:
    """A 4x4 image of one shade, and its name."""
    data = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), (number % 3) * 127, dtype=np.uint8)).save(data, "png")
    return f"p{number:03d}", {"png": data.getvalue(), "txt": WORDS[number % 3].encode()}


def line(number: int) -> tuple[str, dict[str, bytes]]:
    return f"t{number:03d}", {"txt": f"line {number} of some text".encode()[: 8 + number % 9]}


@pytest.fixture
def blend(tmp_path: Path, write_dataset: WriteDataset) -> Path:
    """Pictures with captions, and text without pictures, half and half."""
    splits = {"train": ["train.tar"], "val": ["val.tar"]}
    for name, make, yaml in (("pictures", picture, CAPTION_YAML), ("lines", line, TEXT_YAML)):
        sizes = {"train.tar": TRAIN_SAMPLES, "val.tar": VAL_SAMPLES}
        shards = {shard: [make(number) for number in range(count)] for shard, count in sizes.items()}
        write_dataset(tmp_path / name, shards, splits=splits, dataset_yaml=yaml)
    return blend_yaml(tmp_path / "blend.yaml", [("pictures", 1), ("lines", 1)])


def make_config(
    path: Path,
    output: Path,
    *,
    seed: int = 3,
    data: Section = None,
    mesh: Section = None,
    model: Section = None,
    optimizer: Section = None,
    **train: Any,
) -> TrainerConfig:
    """A small run on the data of a path; sections and values of ``train`` as a configuration has them."""
    batches = {"micro_batch_size": 3, "micro_batches_per_step": 4, "workers": 0, "max_length": 12}
    shape = {"hidden_size": 32, "num_layers": 3, "num_heads": 4, "ffn_size": 48, "tie_embeddings": True}
    return config_from_dict(
        {
            "seed": seed,
            "output": str(output),
            "data": {"path": str(path)} | batches | (data or {}),
            "mesh": mesh or {},
            "model": shape | {"image_size": 4} | (model or {}),
            "optimizer": {"lr": 5e-3, "warmup": 2, "eps": 1e-6} | (optimizer or {}),
            "train": {"steps": 6, "save_every": 2} | train,
        }
    )


def disturb_steps(trainer: Trainer[Any], disturb: Disturb) -> None:
    """Have ``disturb(trainer, step)`` called before each step."""
    undisturbed = trainer.launch

    def disturbed(step: int, batches: Any) -> Any:
        disturb(trainer, step)
        return undisturbed(step, batches)

    trainer.launch = disturbed  # type: ignore[method-assign]


def train(config: TrainerConfig, disturb: Disturb | None = None) -> int:
    """One rank's run. ``disturb(trainer, step)`` is called before each step."""
    with Trainer(config) as trainer:
        if disturb is not None:
            disturb_steps(trainer, disturb)
        return trainer.run()


def metrics(output: Path) -> Lines:
    """The lines of a run's file, without those values that are times."""
    lines = [json.loads(text) for text in (output / "metrics.jsonl").read_text().splitlines()]
    times = {"seconds", "data_wait", "tokens_per_second", "memory_gib"}
    assert all(
        times < entry.keys() for entry in lines if entry["step"]
    )  # before the first, there is nothing but evaluation
    return [{key: value for key, value in entry.items() if key not in times} for entry in lines]


def assert_same_metrics(one: Lines, other: Lines, rel: float = 1e-5, of_norms: float = 1e-4) -> None:
    """Two runs have the same numbers, up to rounding where ranks add them up."""
    for mine, its in zip(one, other, strict=True):
        assert mine.keys() == its.keys()
        for key, value in mine.items():
            within = of_norms if key == "grad_norm" else rel
            assert its[key] == (value if key in ("digest", "tokens", "lr") else pytest.approx(value, rel=within)), key


@dataclass(frozen=True)
class SmallRuns:
    """Runs on one data set, each in a folder of its own, of the settings of :func:`make_config`."""

    run_ranks: RunRanks
    path: Path
    folder: Path

    def config(self, name: str = "run", **settings: Any) -> TrainerConfig:
        return make_config(self.path, self.folder / name, **settings)

    def train(self, world: int, disturb: Disturb | None = None, *, name: str = "run", **settings: Any) -> list[int]:
        """Steps that each rank has done."""
        config = self.config(name, **settings)
        return self.run_ranks(world, lambda rank: train(config, disturb))

    def errors(
        self, error: type[Exception], world: int, disturb: Disturb | None = None, *, name: str = "run", **settings: Any
    ) -> list[str]:
        """What each rank's run ends with."""
        config = self.config(name, **settings)
        return errors_of(self.run_ranks, world, error, lambda rank: train(config, disturb))

    def metrics(self, name: str = "run") -> Lines:
        return metrics(self.folder / name)

    def saved(self, name: str = "run") -> list[int]:
        """The steps of its checkpoints."""
        found = CheckpointFiles(self.folder / name / "checkpoints").names()
        return [int(step.removeprefix("step-")) for step in found]


@pytest.fixture
def runs(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> SmallRuns:
    """Runs on pictures and texts."""
    return SmallRuns(run_ranks, blend, tmp_path)


@contextmanager
def heard(level: int = logging.WARNING, *, of: str = "energon_lite.trainer.training") -> Iterator[list[str]]:
    """What a part of the library logs in this process."""
    said: list[str] = []
    logger, handler = logging.getLogger(of), logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.setLevel(min(level, logging.WARNING))
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def send(number: signal.Signals, *, to_rank: int, at: int) -> Disturb:
    def disturb(trainer: Trainer, step: int) -> None:
        if trainer.mesh.global_rank == to_rank and step == at:
            os.kill(os.getpid(), number)

    return disturb


@pytest.fixture
def measured(blend: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The blend of pictures and texts, with the lengths that the trainer's task encoder gives."""
    (blend.parent / "trainer_rows.py").write_text(
        "from energon_lite.trainer import MultimodalTaskEncoder\n"
        "rows = MultimodalTaskEncoder(max_length=12, image_size=4, patch_size=2)\n"
    )
    monkeypatch.syspath_prepend(str(blend.parent))
    for part in ("train", "val"):
        options = ["--task-encoder", "trainer_rows:rows", "--split-parts", part, "--num-workers", "0", "--no-progress"]
        output_of("measure", blend, *options)
    return blend


def run_part(trainer: Trainer[Any], until: int) -> None:
    """Resume, take the steps up to ``until``, and save, as a run that a signal ends."""
    done, batches = trainer.resume(), iter(trainer.loader)
    for step in range(done, until):
        trainer.step(step + 1, batches)
    trainer.save(until)
    trainer.saver.finish()
    trainer.optimizer.wait_parameters()
