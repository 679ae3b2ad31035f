"""What each page of Energon's documentation shows, written anew: run under energon_lite.extras.energon, and by
Energon itself.

Prints a line of JSON with a result for each page; none depends on an order. Argument: a folder with data sets.
"""

import contextlib
import json
import sys
from collections import Counter
from pathlib import Path

import more_pages
import torch
import yaml
from megatron.energon import (
    Batch,
    CaptioningSample,
    DefaultTaskEncoder,
    SampleDecoder,
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

ALONE = WorkerConfig(rank=0, world_size=1, num_workers=0)


class Texts(DefaultTaskEncoder):
    """Batches are lists of texts."""

    @stateless
    def encode_sample(self, sample):
        return sample.caption

    def batch(self, samples):
        return samples


def taken(dataset, count):
    return [item for item, _ in zip(get_loader(dataset), range(count), strict=False)]


def quickstart(root):
    train = get_train_dataset(
        root / "data",
        batch_size=5,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        worker_config=ALONE,
        repeat=False,
    )
    batches = list(get_loader(train))
    val = get_val_dataset(root / "data", batch_size=5, worker_config=ALONE)
    seen = [key for batch in get_loader(val) for key in batch.__key__]
    return {
        "epoch": sorted(key for batch in batches for key in batch.__key__),
        "val": seen,
        "type": type(val).__mro__[-1].__name__,
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
    dataset = get_val_dataset(root / "data", batch_size=4, worker_config=ALONE, task_encoder=Captions())
    return list(get_loader(dataset))


def default_batch(root):
    batch = next(iter(get_loader(get_val_dataset(root / "data", batch_size=4, worker_config=ALONE))))
    return {"shape": list(batch.image.shape), "sum": round(batch.image.sum().item(), 3), "captions": batch.caption}


def metadataset(root):
    (root / "blend.yaml").write_text(
        yaml.safe_dump(
            {
                "__module__": "megatron.energon",
                "__class__": "MetadatasetV2",
                "splits": {
                    "train": {
                        "blend": [
                            {"path": "./data", "weight": 3, "subflavors": {"kind": "a"}},
                            {"path": "./more", "weight": 1, "subflavors": {"kind": "b"}},
                        ]
                    },
                    "val": {"path": "./data", "split_part": "val"},
                },
            }
        )
    )

    class Kinds(DefaultTaskEncoder):
        def encode_sample(self, sample):
            return sample.__subflavors__["kind"]

        def batch(self, samples):
            return samples

    train = get_train_dataset(
        root / "blend.yaml",
        batch_size=50,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        worker_config=ALONE,
        task_encoder=Kinds(),
    )
    shares = Counter(kind for batch in taken(train, 40) for kind in batch)
    found = traverse_metadataset(root / "blend.yaml", split_part="train")
    return {
        "share": abs(shares["a"] / 2000 - 0.75) < 0.05,
        "traversed": [[one.path.name, one.split_part, one.subflavors] for one in found],
        "loaded": [
            [type(one.dataset).__name__, isinstance(one.dataset, BaseCoreDatasetFactory), len(one.dataset)]
            for one in load_dataset(root / "blend.yaml")
            .get_datasets(training=False, split_part="train", worker_config=ALONE)
            .datasets
        ],
    }


def epochized_blending(root):
    document = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {
            "train": {"blend_epochized": [{"path": "data", "repetitions": 2}, {"path": "more", "repetitions": 1}]}
        },
    }
    (root / "epochized.yaml").write_text(yaml.safe_dump(document))
    train = get_train_dataset(
        root / "epochized.yaml",
        batch_size=1,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        worker_config=ALONE,
        task_encoder=Texts(),
        repeat=False,
    )
    return sorted(Counter(text for batch in get_loader(train) for text in batch).items())


def subsets(root):
    document = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {"train": {"path": "data", "subset": {"range": ["25%", "75%"]}}},
    }
    (root / "subset.yaml").write_text(yaml.safe_dump(document))
    dataset = get_val_dataset(
        root / "subset.yaml", split_part="train", batch_size=4, worker_config=ALONE, task_encoder=Texts()
    )
    return [text for batch in get_loader(dataset) for text in batch]


def save_restore(root):
    def build():
        return get_savable_loader(
            get_train_dataset(
                root / "data",
                batch_size=3,
                shuffle_buffer_size=10,
                max_samples_per_sequence=10,
                worker_config=ALONE,
                task_encoder=Texts(),
            )
        )

    loader = build()
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    torch.save(loader.save_state_rank(), root / "state.pt")
    everywhere = loader.save_state_global(global_dst_rank=0)
    expected = [next(batches) for _ in range(4)]
    found = []
    for state in (torch.load(root / "state.pt", weights_only=False), everywhere):
        again = build()
        (again.restore_state_global if state is everywhere else again.restore_state_rank)(state)
        found.append([batch for batch, _ in zip(again, range(4), strict=False)])
    return found == [expected, expected]


def restore_one(root):
    train = get_train_dataset(
        root / "data", batch_size=3, shuffle_buffer_size=None, max_samples_per_sequence=None, worker_config=ALONE
    )
    loader = get_savable_loader(train)
    batches = [batch for batch, _ in zip(loader, range(4), strict=False)]
    assert loader.can_restore_sample()
    return [loader.restore_sample(batch.__restore_key__).__key__ == batch.__key__ for batch in batches]


def data_decoding(root):
    class Decoded(Texts):
        decoder = SampleDecoder(image_decode="pilrgb")

        def encode_sample(self, sample):
            return [sample.image.mode, list(sample.image.size)]

    class Raw(Texts):
        decoder = None

        def encode_sample(self, sample):
            return sample.image[:4].hex()

    return [
        next(iter(get_loader(get_val_dataset(root / "data", batch_size=2, worker_config=ALONE, task_encoder=encoder))))
        for encoder in (Decoded(), Raw())
    ]


PAGES = (
    quickstart,
    task_encoder,
    default_batch,
    metadataset,
    epochized_blending,
    subsets,
    save_restore,
    restore_one,
    data_decoding,
)

if __name__ == "__main__":
    folder, results = Path(sys.argv[1]), {}
    assert issubclass(DefaultTaskEncoder, TaskEncoder)
    for page in (*PAGES, *more_pages.PAGES):
        with contextlib.redirect_stdout(sys.stderr):
            results[page.__name__] = page(folder)
    print(json.dumps(results))
