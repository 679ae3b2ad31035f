"""Data for torchtitan's tests: sequences of known lengths, some of which begin with a picture, in packed batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from energon_lite import (
    BestFit,
    ByTokens,
    Capacity,
    Chunks,
    SavableDataLoader,
    TaskEncoder,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    pack_sequences,
    register_source,
    stateless,
)
from energon_lite.batching import TokenSequence, next_token_pairs
from energon_lite.extras.frameworks.torchtitan import LoaderRequest

#: Tokens from here on keep the place of a picture's patches.
PICTURE = 500
#: Numbers of a patch: the width of the debug model.
WIDTH = 256


def length_of(index: int) -> int:
    """Positions of sample ``index``: 3 to 20."""
    return index * 7 % 18 + 3


class Sequences:
    """So many samples, whose lengths are known before they are read."""

    portable = True

    def __init__(self, url: str, split: str):
        self.length, self.identity = int(url.removeprefix("titan://")), url

    def __len__(self) -> int:
        return self.length

    def column(self, name: str) -> np.ndarray:
        return np.array([length_of(index) for index in range(self.length)])

    def read(self, index: int) -> dict[str, Any]:
        return {"n": index}


class Encoder(TaskEncoder):
    """Every third sample begins with a picture of two or three patches."""

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> TokenSequence:
        number = sample["n"]
        tokens = (torch.arange(length_of(number) + 1) * 31 + number) % PICTURE
        if number % 3:
            media = None
        else:
            patches = 2 + number % 2
            tokens[:patches] = PICTURE
            values = torch.arange(patches * WIDTH, dtype=torch.float32).view(1, patches, WIDTH)
            media = {"pixel_values": (values + number).sin(), "grid_thw": torch.tensor([[1, patches, 1]])}
        row, labels, mask = next_token_pairs(tokens, tokens != PICTURE)
        keys = {name: sample[name] for name in ("__key__", "__restore_key__")}
        return TokenSequence(**keys, tokens=row, labels=labels, loss_mask=mask, media=media)

    @stateless(restore_seeds=False)
    def batch(self, samples: list[TokenSequence]) -> Any:
        return pack_sequences(samples, pad=0)

    def empty_batch(self, like: Any, rows: int) -> Any:
        return self.batch([])


def packs(request: LoaderRequest, chunk: int = 256, **options: Any) -> dict[str, Any]:
    batching = ByTokens(BestFit(Capacity(request.seq_len or 48)), **options)
    chunks = Chunks(size=chunk)
    return {"worker_config": request.worker_config, "batching": batching, "chunks": chunks, "task_encoder": Encoder()}


def train(request: LoaderRequest) -> SavableDataLoader:
    return get_savable_loader(get_train_dataset(request.dataset_path, **packs(request)))


def train_unmeasured(request: LoaderRequest) -> SavableDataLoader:
    """The same, but nobody knows the lengths before the samples are made."""
    dataset = get_train_dataset(request.dataset_path, **packs(request, 16, length_column=None))
    return get_savable_loader(dataset)


def validate(request: LoaderRequest) -> SavableDataLoader:
    return get_savable_loader(get_val_dataset(request.dataset_path, **packs(request)))


register_source("titan", Sequences)
