"""The data path of a multimodal trainer as it is written for Energon: run under energon_lite.extras.energon, and by
Energon.

Prints a line of JSON. Arguments: the data set's folder, and a file for the loader's state.
"""

import dataclasses
import json
import sys
from typing import Any

import numpy as np
import torch
from megatron.energon import (
    Batch,
    CaptioningSample,
    Cooker,
    DefaultTaskEncoder,
    LimitDataset,
    RepeatDataset,
    Sample,
    SkipSample,
    WorkerConfig,
    basic_sample_keys,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_datasets,
    stateless,
)
from megatron.energon.flavors.base_dataset import Sample as SampleBase
from megatron.energon.task_encoder.base import stateless as stateless_of_base

PAD = 0


@dataclasses.dataclass
class ImageTaskSample(Sample):
    """What the encoder makes of a sample."""

    __key__: str
    __restore_key__: tuple
    __subflavors__: dict
    __sources__: Any
    imgs: torch.Tensor
    tokens: torch.Tensor
    total_len: int


@dataclasses.dataclass
class ImageTaskSamplePacked(Sample):
    """Several of them in one sequence."""

    __key__: str
    __restore_key__: tuple
    __subflavors__: dict
    __sources__: Any
    imgs: list
    tokens: torch.Tensor
    cu_lengths: torch.Tensor


@dataclasses.dataclass
class ImageTaskBatchPacked(Batch):
    """What the trainer is given."""

    imgs: torch.Tensor
    tokens: torch.Tensor
    cu_lengths: torch.Tensor


@stateless
def cook_captions(sample: dict) -> CaptioningSample:
    return CaptioningSample(**basic_sample_keys(sample), image=sample["png"], caption=sample["txt"])


class TaskEncoder(DefaultTaskEncoder[Sample, ImageTaskSample, ImageTaskBatchPacked, dict]):
    """Captions to tokens; samples packed into sequences of at most 24 tokens."""

    cookers = [Cooker(cook_captions)]

    def __init__(self) -> None:
        super().__init__()
        self.seq_len = 24

    @stateless(restore_seeds=True)
    def encode_sample(self, sample):
        if not isinstance(sample, CaptioningSample):
            raise SkipSample
        tokens = torch.tensor([ord(one) for one in sample.caption])
        return ImageTaskSample(
            __key__=sample.__key__,
            __restore_key__=sample.__restore_key__,
            __subflavors__=sample.__subflavors__,
            __sources__=sample.__sources__,
            imgs=torch.as_tensor(np.array(sample.image)).float() / 255.0,
            tokens=tokens,
            total_len=len(tokens),
        )

    def select_samples_to_pack(self, samples):
        packs, room = [[]], self.seq_len
        for sample in samples:
            if sample.total_len > room:
                packs.append([])
                room = self.seq_len
            packs[-1].append(sample)
            room -= sample.total_len
        return packs

    @stateless
    def pack_selected_samples(self, samples):
        tokens = torch.cat([sample.tokens for sample in samples])
        lengths = torch.tensor([0, *(sample.total_len for sample in samples)])
        return ImageTaskSamplePacked(
            __key__=",".join(sample.__key__ for sample in samples),
            __restore_key__=(),
            __subflavors__=samples[0].__subflavors__,
            __sources__=None,
            imgs=[sample.imgs for sample in samples],
            tokens=torch.nn.functional.pad(tokens, (0, self.seq_len - len(tokens)), value=PAD),
            cu_lengths=lengths.cumsum(0).int(),
        )

    def batch(self, samples):
        longest = max(len(sample.cu_lengths) for sample in samples)
        lengths = torch.full((len(samples), longest), self.seq_len, dtype=torch.int32)
        for row, sample in enumerate(samples):
            lengths[row, : len(sample.cu_lengths)] = sample.cu_lengths
        return ImageTaskBatchPacked(
            __key__=[sample.__key__ for sample in samples],
            __restore_key__=tuple(sample.__restore_key__ for sample in samples),
            imgs=torch.tensor([len(sample.imgs) for sample in samples]),
            tokens=torch.stack([sample.tokens for sample in samples]),
            cu_lengths=lengths,
        )

    def encode_batch(self, batch):
        raw = dataclasses.asdict(batch)
        del raw["__subflavors__"]
        return raw


def print_error_handler(exc, key):
    print("sample failed", key, exc, file=sys.stderr)


def datasets_provider(path, worker_config, packing_buffer_size):
    train = get_train_dataset(
        path,
        batch_size=2,
        task_encoder=TaskEncoder(),
        virtual_epoch_length=1000,
        max_samples_per_sequence=100,
        shuffle_buffer_size=100,
        worker_config=worker_config,
        packing_buffer_size=packing_buffer_size,
        handler=print_error_handler,
        image_decode="pil",
    )
    validation = get_val_datasets(
        path,
        batch_size=2,
        task_encoder=TaskEncoder(),
        worker_config=worker_config,
        packing_buffer_size=packing_buffer_size,
        handler=print_error_handler,
        image_decode="pil",
    )
    limited = [
        LimitDataset(
            RepeatDataset(dataset, worker_config=worker_config),
            length=3,
            worker_config=worker_config,
            reset_after_epoch=True,
        )
        for dataset, _ in validation
    ]
    return train, limited, [str(source.paths[0]) for _, source in validation]


class EnergonDataloader:
    """Goes round and round."""

    def __init__(self, dataloader):
        self._dataloader = dataloader
        self._iter = iter(self._cyclic(dataloader))

    @staticmethod
    def _cyclic(loader):
        while True:
            yield from loader

    def __next__(self):
        return next(self._iter)

    def save_state(self):
        return self._dataloader.save_state_rank()


def main(path: str, state_file: str) -> None:
    worker_config = WorkerConfig(
        rank=0, world_size=1, num_workers=2, data_parallel_group=None, worker_debug_path=None, worker_log_level=0
    )
    train, limited, paths = datasets_provider(path, worker_config, packing_buffer_size=8)
    loader = get_savable_loader(train, worker_config=worker_config)
    batches = EnergonDataloader(loader)
    validation = [EnergonDataloader(get_loader(one, worker_config=worker_config)) for one in limited]
    for _ in range(3):
        first = next(batches)
    torch.save({"dataloader_state_dict": batches.save_state()}, state_file)
    after = [next(batches)["__key__"] for _ in range(4)]
    again = get_savable_loader(datasets_provider(path, worker_config, packing_buffer_size=8)[0])
    again.restore_state_rank(torch.load(state_file, map_location="cpu", weights_only=False)["dataloader_state_dict"])
    resumed = [batch["__key__"] for batch, _ in zip(again, range(4), strict=False)]
    evaluated = [[next(validation[0])["__key__"] for _ in range(3)] for _ in range(2)]
    print(
        json.dumps(
            {
                "shapes": {key: list(value.shape) for key, value in first.items() if isinstance(value, torch.Tensor)},
                "exact": resumed == after,
                "same evaluation": evaluated[0] == evaluated[1],
                "torch loader": isinstance(loader, torch.utils.data.DataLoader),
                "evaluated": sorted({key for batch in evaluated[0] for keys in batch for key in keys.split(",")}),
                "bases": SampleBase is Sample and stateless is stateless_of_base,
                "paths": paths,
                "library": get_train_dataset.__module__.split(".")[0],
            }
        )
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
