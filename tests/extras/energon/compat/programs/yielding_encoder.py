"""A multimodal encoder that yields, as trainers write it for Energon: each kind of sample has an encoder, the hook is a
generator, validation is wrapped to a number of batches, and the state of all ranks is in the trainer's checkpoint. Run
under energon_lite.extras.energon, and by Energon.

Prints a line of JSON. Arguments: the data set's folder.
"""

import io
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from megatron.energon import (
    Batch,
    CaptioningSample,
    DefaultTaskEncoder,
    LimitDataset,
    OCRSample,
    RepeatDataset,
    Sample,
    SavableDataLoader,
    VQASample,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_datasets,
    stateless,
)
from megatron.energon.flavors.base_dataset import Sample as SampleOfBase
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.task_encoder.base import stateless as stateless_of_base

BATCH, BATCHES = 4, 12


@dataclass
class Encoded(Sample):
    """Pixels and tokens."""

    pixels: torch.Tensor
    tokens: torch.Tensor


@dataclass
class Rows(Batch):
    """Padded rows of them."""

    pixels: torch.Tensor
    tokens: torch.Tensor


class Encoder(DefaultTaskEncoder[Sample, Encoded, Rows, dict]):
    """Yields for each sample what the encoder of its kind makes, for some of them nothing, for others two."""

    def encode_sample(self, sample: Sample) -> Any:
        if isinstance(sample, OCRSample):
            yield self.encode_text(sample, sample.text)
        elif isinstance(sample, CaptioningSample):
            number = int(sample.caption.split()[-1])
            if number % 7 == 3:
                return
            yield self.encode_text(sample, sample.caption)
            if number % 5 == 0:
                yield self.encode_text(sample, f"again {sample.caption}")
        elif isinstance(sample, VQASample):
            yield self.encode_text(sample, f"{sample.context} {sample.answers}")
        else:
            raise NotImplementedError(f"no encoder of {type(sample).__name__}")

    def encode_text(self, sample: Any, text: str) -> Encoded:
        pixels = torch.as_tensor(np.array(sample.image)).float() / 255.0
        return Encoded(
            __key__=sample.__key__,
            __restore_key__=sample.__restore_key__,
            __subflavors__=sample.__subflavors__,
            pixels=pixels.flatten()[:3],
            tokens=torch.tensor([ord(one) for one in text]),
        )

    def batch(self, samples: list) -> Rows:
        return Rows(
            __key__=[sample.__key__ for sample in samples],
            __restore_key__=[sample.__restore_key__ for sample in samples],
            pixels=torch.stack([sample.pixels for sample in samples]),
            tokens=torch.nn.utils.rnn.pad_sequence([sample.tokens for sample in samples], batch_first=True),
        )

    def encode_batch(self, batch: Rows) -> dict:
        raw = asdict(batch)
        del raw["__subflavors__"]
        return raw | {"keys": batch.__key__}


def print_error(exc, key):
    print("sample failed", key, exc, file=sys.stderr)


def datasets_provider(path: str, config: WorkerConfig) -> tuple[SavableDataset[Rows], list, list, list[bool]]:
    shared: dict[str, Any] = {"batch_size": BATCH, "task_encoder": Encoder(), "worker_config": config}
    shared |= {"packing_buffer_size": None, "handler": print_error, "image_decode": "pil"}
    train = get_train_dataset(
        path, virtual_epoch_length=1000, max_samples_per_sequence=100, shuffle_buffer_size=100, **shared
    )
    limit: dict[str, Any] = {"worker_config": config, "reset_after_epoch": True}
    repeated = (RepeatDataset(one, worker_config=config) for one, _ in get_val_datasets(path, **shared))
    validation = [LimitDataset(one, length=BATCHES, **limit) for one in repeated]
    wrapped = get_val_datasets(path, limit=None, **shared)
    plain = [LimitDataset(one, length=3, **limit) for one, _ in wrapped]
    return train, validation, plain, [str(source.paths[0]) == path for _, source in wrapped]


def main(path: str) -> None:
    found: dict = {"library": get_train_dataset.__module__.split(".")[0]}
    for workers in (0, 2):
        given: dict[str, Any] = {"data_parallel_group": None, "worker_debug_path": None, "worker_log_level": 0}
        config = WorkerConfig(rank=0, world_size=1, num_workers=workers, **given)
        train, validation, plain, paths = datasets_provider(path, config)
        loader: SavableDataLoader[dict] = get_savable_loader(train, worker_config=config)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        checkpoint = io.BytesIO()
        torch.save({"dataloader_state": loader.save_state_global(global_dst_rank=0)}, checkpoint)
        after = [next(batches)["keys"] for _ in range(4)]
        again = get_savable_loader(datasets_provider(path, config)[0], worker_config=config)
        checkpoint.seek(0)
        again.restore_state_global(torch.load(checkpoint, weights_only=False)["dataloader_state"], src_rank=None)
        resumed = iter(again)
        loaders = [get_loader(one[0], worker_config=config) for one in (validation, plain)]
        evaluated = [
            [[[batch["keys"], batch["tokens"].tolist()] for batch in one] for _ in range(2)] for one in loaders
        ]
        found[f"{workers} workers"] = {
            "exact": [next(resumed)["keys"] for _ in range(4)] == after,
            "lengths": [[len(one) for one in passes] for passes in evaluated],
            "different": len({json.dumps(batch) for batch in evaluated[0][0]}),
            "evaluated": evaluated,
            "paths": paths,
            "torch loader": isinstance(loader, torch.utils.data.DataLoader),
        }
    found["bases"] = SampleOfBase is Sample and stateless is stateless_of_base
    print(json.dumps(found))
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
