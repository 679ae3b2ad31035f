"""What pages of Energon's documentation show, written anew: run under energon_lite.extras.energon, and by
Energon itself.

Prints a line of JSON with a result for each page; none depends on an order. Argument: a folder with data sets.
"""

import contextlib
import json
import sys
from pathlib import Path

import torch
import yaml
from megatron.energon import (
    Batch,
    BlendDataset,
    CaptioningSample,
    ConcatDataset,
    DefaultTaskEncoder,
    LimitDataset,
    MapDataset,
    RepeatDataset,
    TaskEncoder,
    WorkerConfig,
    batch_list,
    batch_pad_stack,
    edataclass,
    generic_batch,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    load_dataset,
    stateless,
    traverse_metadataset,
)
from megatron.energon.flavors import BaseCoreDatasetFactory
from megatron.energon.wrappers import concat_pad

ALONE = WorkerConfig(rank=0, world_size=1, num_workers=0)


class Texts(DefaultTaskEncoder):
    """Batches are lists of texts."""

    @stateless
    def encode_sample(self, sample):
        return sample.caption

    def batch(self, samples):
        return samples


def val(root, encoder, batch_size=3, **more):
    return get_val_dataset(root / "data", batch_size=batch_size, worker_config=ALONE, task_encoder=encoder, **more)


def quickstart(root):
    """Also what a batch is by default, and that it can be made again."""
    order = {"shuffle_buffer_size": 100, "max_samples_per_sequence": 100}
    train = get_train_dataset(root / "data", batch_size=5, worker_config=ALONE, repeat=False, **order)
    loader = get_savable_loader(train)
    batches = list(loader)
    assert loader.can_restore_sample()
    again = loader.restore_sample(batches[3].__restore_key__)
    first, *rest = get_loader(get_val_dataset(root / "data", batch_size=5, worker_config=ALONE))
    return {
        "epoch": sorted(key for batch in batches for key in batch.__key__),
        "again": again.__key__ == batches[3].__key__,
        "val": [key for batch in (first, *rest) for key in batch.__key__],
        "first": [list(first.image.shape), round(first.image.sum().item(), 3), first.caption],
    }


@edataclass
class Encoded:
    __key__: str
    image: torch.Tensor
    tokens: torch.Tensor


@edataclass
class RawBatch(Batch):
    image: torch.Tensor
    tokens: torch.Tensor


class Captions(DefaultTaskEncoder[CaptioningSample, Encoded, RawBatch, dict]):
    def encode_sample(self, sample):
        tokens = torch.tensor([ord(letter) for letter in sample.caption])
        return Encoded(__key__=sample.__key__, image=sample.image, tokens=tokens)

    def batch(self, samples):
        return RawBatch(
            __key__=batch_list([one.__key__ for one in samples]),
            __restore_key__=(),
            image=batch_pad_stack([one.image for one in samples]),
            tokens=generic_batch([one.tokens for one in samples]),
        )

    def encode_batch(self, batch):
        return {"keys": batch.__key__, "image": list(batch.image.shape), "tokens": batch.tokens.sum().item()}


def task_encoder(root):
    return list(get_loader(val(root, Captions(), 4)))


def metadataset(root):
    blend = [
        {"path": "./data", "weight": 3, "subflavors": {"kind": "a"}},
        {"path": "./more", "weight": 1, "subflavors": {"kind": "b"}},
    ]
    splits = {"train": {"blend": blend}, "val": {"path": "./data", "split_part": "val"}}
    document = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits}
    (root / "blend.yaml").write_text(yaml.safe_dump(document))

    found = traverse_metadataset(root / "blend.yaml", split_part="train")
    document = load_dataset(root / "blend.yaml")
    loaded = document.get_datasets(training=False, split_part="train", worker_config=ALONE).datasets
    factories = [one.dataset for one in loaded]
    assert all(isinstance(one, BaseCoreDatasetFactory) for one in factories)
    return {
        "traversed": [[one.path.name, one.split_part, one.subflavors] for one in found],
        "loaded": [[type(one).__name__, len(one)] for one in factories],
    }


def custom_sample_loader(root):
    return [text for batch in get_loader(val(root, Texts(), dataset_config="own_loader.yaml")) for text in batch]


def custom_dataset(root):
    class Chats(Texts):
        def encode_sample(self, sample):
            return f"{type(sample).__name__} {sample.conversation}"

    return [text for batch in get_loader(val(root, Chats(), dataset_config="own_class.yaml")) for text in batch]


def wrappers(root):
    def build():
        return val(root, Texts(), None)

    mapped = MapDataset(build(), str.upper, worker_config=ALONE)
    both = ConcatDataset(mapped, build(), worker_config=ALONE)
    limited = LimitDataset(RepeatDataset(build(), worker_config=ALONE), 25, worker_config=ALONE)
    blended = BlendDataset((build(), 1), (mapped, 1), worker_config=ALONE)
    loader = get_loader(limited)
    return {
        "concat": list(get_loader(both)),
        "limit": [len(list(loader)), len(list(loader))],
        "blend": sorted(get_loader(blended)),
        "concat_pad": list(concat_pad([torch.ones(1, 2), torch.ones(2, 1)]).shape),
    }


PAGES = [quickstart, task_encoder, metadataset, custom_sample_loader, custom_dataset, wrappers]

if __name__ == "__main__":
    folder, results = Path(sys.argv[1]), {}
    assert issubclass(DefaultTaskEncoder, TaskEncoder)
    for page in PAGES:
        with contextlib.redirect_stdout(sys.stderr):
            results[page.__name__] = page(folder)
    print(json.dumps(results))
