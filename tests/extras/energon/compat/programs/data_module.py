"""A data module as frameworks write it around Energon: one provider for both splits, loaders made when asked for,
its state in the trainer's checkpoint. Run under energon_lite.extras.energon, and by Energon.

Prints a line of JSON. Arguments: the data set's folder, and a file for the state.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from megatron.energon import (
    CaptioningSample,
    DefaultTaskEncoder,
    Sample,
    SavableDataLoader,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from megatron.energon.flavors.base_dataset import SavableDataset

T = TypeVar("T", bound=Sample)


@dataclass
class TextSample(Sample):
    """Tokens of a caption, and where the answer is."""

    tokens: torch.Tensor
    loss_mask: torch.Tensor


class Encoder(DefaultTaskEncoder[CaptioningSample, TextSample, dict, dict]):
    """Captions to tokens; batches as dicts of what the model takes."""

    @stateless
    def encode_sample(self, sample: CaptioningSample) -> TextSample:
        tokens = torch.tensor([ord(one) for one in sample.caption])
        return TextSample(
            __key__=sample.__key__,
            __restore_key__=sample.__restore_key__,
            __subflavors__=sample.__subflavors__,
            tokens=tokens,
            loss_mask=(tokens != ord(" ")).float(),
        )

    def batch(self, samples: list) -> dict:
        return {
            "__keys__": [sample.__key__ for sample in samples],
            "__restore_key__": [sample.__restore_key__ for sample in samples],
            "tokens": torch.nn.utils.rnn.pad_sequence([sample.tokens for sample in samples], batch_first=True),
            "loss_mask": torch.nn.utils.rnn.pad_sequence([sample.loss_mask for sample in samples], batch_first=True),
        }

    def encode_batch(self, batch: dict) -> dict:
        return {**batch, "position_ids": torch.arange(batch["tokens"].shape[1])}


class DataModule(Generic[T]):
    """Loaders of one path, for a trainer."""

    def __init__(self, path: str, *, micro_batch_size: int, num_workers: int, num_val_workers: int | None = None):
        self.path, self.micro_batch_size = path, micro_batch_size
        self.num_workers = num_workers
        self.num_val_workers = num_workers if num_val_workers is None else num_val_workers
        self.train_loader: SavableDataLoader[dict] | None = None
        self.val_loader: SavableDataLoader[dict] | None = None

    def datasets_provider(self, worker_config: WorkerConfig, split: str) -> SavableDataset[T]:
        if split not in ("train", "val"):
            raise ValueError(f"unknown split {split}")
        shared: dict[str, Any] = {
            "batch_size": self.micro_batch_size,
            "task_encoder": Encoder(),
            "worker_config": worker_config,
            "packing_buffer_size": None,
            "split_part": split,
        }
        if split == "train":
            return get_train_dataset(
                self.path, shuffle_buffer_size=100, max_samples_per_sequence=None, virtual_epoch_length=0, **shared
            )
        return get_val_dataset(self.path, limit=None, **shared)

    def config(self, num_workers: int) -> WorkerConfig:
        return WorkerConfig(
            rank=0,
            world_size=1,
            num_workers=num_workers,
            data_parallel_group=None,
            worker_debug_path=None,
            worker_log_level=0,
        )

    def train_dataloader(self) -> "SavableDataLoader[dict]":
        if self.train_loader is None:
            config = self.config(self.num_workers)
            self.train_loader = get_savable_loader(self.datasets_provider(config, "train"), worker_config=config)
        return self.train_loader

    def val_dataloader(self) -> "SavableDataLoader[dict]":
        if self.val_loader is None:
            config = self.config(self.num_val_workers)
            self.val_loader = get_savable_loader(self.datasets_provider(config, "val"), worker_config=config)
        return self.val_loader

    def state_dict(self) -> dict:
        return {"dataloader_state": self.train_dataloader().save_state_global(global_dst_rank=0)}

    def load_state_dict(self, state: dict) -> None:
        self.train_dataloader().restore_state_global(state["dataloader_state"], src_rank=None)


def facts(batch: dict) -> dict:
    return {
        "keys": batch["__keys__"],
        "tokens": batch["tokens"].tolist(),
        "loss": batch["loss_mask"].sum().item(),
        "positions": batch["position_ids"].tolist(),
    }


def main(path: str, state_file: str) -> None:
    found: dict = {"library": get_train_dataset.__module__.split(".")[0]}
    for workers in (0, 2):
        module: DataModule[TextSample] = DataModule(path, micro_batch_size=4, num_workers=workers)
        train = iter(module.train_dataloader())
        seen = [next(train) for _ in range(3)]
        torch.save(module.state_dict(), state_file)
        after = [next(train)["__keys__"] for _ in range(5)]
        again: DataModule[TextSample] = DataModule(path, micro_batch_size=4, num_workers=workers)
        again.load_state_dict(torch.load(state_file, weights_only=False))
        resumed = iter(again.train_dataloader())
        found[f"{workers} workers"] = {
            "exact": [next(resumed)["__keys__"] for _ in range(5)] == after,
            "train": {key[0] for batch in seen for key in batch["__keys__"]} == {"k"},
            "shapes": [list(batch["tokens"].shape) for batch in seen],
            "val": [[facts(batch) for batch in module.val_dataloader()] for _ in range(2)],
            "val length": len(module.val_dataloader()),
        }
    print(json.dumps(found))
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
