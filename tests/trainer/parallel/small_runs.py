"""Small runs of the trainer: pictures and text, a configuration, and a run that a test may disturb."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from energon_lite.trainer import Trainer, TrainerConfig, config_from_dict
from tests.testing import output_of

WriteDataset = Callable[..., Path]
WORDS = ["black", "grey", "white"]
VAL_SAMPLES, TRAIN_SAMPLES = 7, 24

BATCHING: dict[str, dict[str, Any]] = {
    "capacity": {"strategy": "capacity", "capacity": 48},
    "best_fit": {"strategy": "best_fit", "capacity": 40, "open_bins": 4},
    "cost": {"strategy": "best_fit", "capacity": 40, "unit": "cost", "alpha": 64},
}

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
    for name, make, yaml in (("pictures", picture, CAPTION_YAML), ("lines", line, None)):
        shards = {
            "train.tar": [make(number) for number in range(TRAIN_SAMPLES)],
            "val.tar": [make(number) for number in range(VAL_SAMPLES)],
        }
        write_dataset(tmp_path / name, shards, splits=splits, **({"dataset_yaml": yaml} if yaml else {}))
    path = tmp_path / "blend.yaml"
    parts = "\n".join(f"      - {{path: {name}, weight: 1}}" for name in ("pictures", "lines"))
    path.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n"
        f"  train:\n    blend:\n{parts}\n  val:\n    blend:\n{parts}\n"
    )
    return path


def make_config(
    blend: Path,
    output: Path,
    *,
    tp: int = 1,
    workers: int = 0,
    lr: float = 5e-3,
    mesh: dict[str, Any] | None = None,
    share: str = "load",
    **train: Any,
) -> TrainerConfig:
    shape = {"hidden_size": 32, "num_layers": 3, "num_heads": 4, "ffn_size": 48, "tie_embeddings": True}
    return config_from_dict(
        {
            "seed": 3,
            "output": str(output),
            "data": {
                "path": str(blend),
                "micro_batch_size": 3,
                "micro_batches_per_step": 4,
                "workers": workers,
                "share": share,
                "max_length": 12,
            },
            "mesh": {"tp": tp} | (mesh or {}),
            "model": shape | {"image_size": 4},
            "optimizer": {"lr": lr, "warmup": 2, "eps": 1e-6},
            "train": {"steps": 6, "save_every": 2} | train,
        }
    )


def train(config: TrainerConfig, disturb: Callable[[Trainer, int], None] | None = None) -> int:
    """One rank's run. ``disturb(trainer, step)`` is called before each step."""
    with Trainer(config) as trainer:
        undisturbed = trainer.launch

        def disturbed(step: int, batches: Any) -> Any:
            if disturb is not None:
                disturb(trainer, step)
            return undisturbed(step, batches)

        trainer.launch = disturbed  # type: ignore[method-assign]
        return trainer.run()


def metrics(output: Path) -> list[dict[str, Any]]:
    """The lines of a run's file, without those values that are times."""
    lines = [json.loads(text) for text in (output / "metrics.jsonl").read_text().splitlines()]
    times = {"seconds", "data_wait", "tokens_per_second", "memory_gib"}
    assert all(times < entry.keys() for entry in lines)
    return [{key: value for key, value in entry.items() if key not in times} for entry in lines]


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


def send(number: signal.Signals, *, to_rank: int, at: int) -> Callable[[Trainer, int], None]:
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
