"""Captions that a trained model generates for held-out digits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from energon_lite import WorkerConfig, get_loader, get_val_dataset
from energon_lite.trainer import generate_captions, load_model


@dataclass(frozen=True)
class Reading:
    """A caption that a model generated.

    Args:
        key: the sample.
        image: float ``[3, height, width]`` in [0, 1].
        caption: the caption it has.
        said: the caption that the model generated.
    """

    key: str
    image: torch.Tensor
    caption: str
    said: str

    @property
    def right(self) -> bool:
        """True if the answer equals the right one exactly."""
        return self.said == self.caption


def read_held_out(data: Path, checkpoint: Path, *, batch_size: int = 64) -> list[Reading]:
    """Caption all images of a data set's val split, each once.

    Args:
        data: a prepared folder or a metadataset of captioned images.
        checkpoint: a trained model's.
        batch_size: images at a time.
    """
    # A model this small generates fastest with one thread.
    torch.set_num_threads(1)
    model = load_model(checkpoint)
    alone = WorkerConfig(rank=0, world_size=1, num_workers=0)
    readings = []
    with get_loader(get_val_dataset(data, worker_config=alone, batch_size=batch_size)) as loader:
        for batch in loader:
            said = generate_captions(model, batch.image)
            for sample in zip(batch.__key__, batch.image, batch.caption, said, strict=True):
                readings.append(Reading(*sample))
    return readings


def accuracy(readings: Sequence[Reading]) -> float:
    """The share of right answers."""
    return sum(reading.right for reading in readings) / len(readings)
