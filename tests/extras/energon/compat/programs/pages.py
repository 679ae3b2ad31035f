"""What pages of Energon's documentation show, written anew: run under energon_lite.extras.energon, and by
Energon itself.

Prints a line of JSON with a result for each page; none depends on an order. Argument: a folder with data sets.
"""

import contextlib
import json
import sys
from collections import Counter
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
    SampleDecoder,
    SkipSample,
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
    log_exception,
    stateless,
    traverse_metadataset,
)
from megatron.energon.epathlib import EPath
from megatron.energon.errors import FatalSampleError
from megatron.energon.flavors import BaseCoreDatasetFactory
from megatron.energon.flavors.webdataset import EmptyDatasetError
from megatron.energon.wrappers import concat_pad

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


def custom_sample_loader(root):
    dataset = get_val_dataset(
        root / "data", batch_size=3, worker_config=ALONE, task_encoder=Texts(), dataset_config="own_loader.yaml"
    )
    return [text for batch in get_loader(dataset) for text in batch]


def custom_dataset(root):
    class Chats(Texts):
        def encode_sample(self, sample):
            return f"{type(sample).__name__} {sample.conversation}"

    dataset = get_val_dataset(
        root / "data", batch_size=3, worker_config=ALONE, task_encoder=Chats(), dataset_config="own_class.yaml"
    )
    return [text for batch in get_loader(dataset) for text in batch]


def error_handling(root):
    class Skipping(Texts):
        @stateless
        def encode_sample(self, sample):
            if sample.caption.endswith("1"):
                raise SkipSample()
            if sample.caption.endswith("2"):
                raise ValueError("broken")
            return sample.caption

    class Fatal(Texts):
        def encode_sample(self, sample):
            raise FatalSampleError.from_sample(sample, "no license")

    config = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=lambda *_: None)
    assert callable(log_exception) and issubclass(EmptyDatasetError, Exception)
    dataset = get_val_dataset(root / "data", batch_size=1, worker_config=config, task_encoder=Skipping())
    kept = sorted(text for batch in get_loader(dataset) for text in batch)
    try:
        next(iter(get_loader(get_val_dataset(root / "data", batch_size=1, worker_config=config, task_encoder=Fatal()))))
        ended = False
    except FatalSampleError as error:
        ended = "no license" in str(error)
    return [kept, ended]


def wrappers(root):
    def build():
        return get_val_dataset(root / "data", batch_size=None, worker_config=ALONE, task_encoder=Texts())

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


def paths(root):
    path = EPath(root / "data")
    meta = path / ".nv-meta"
    return [
        path.name,
        meta.parent == path,
        (meta / "split.yaml").is_file(),
        meta.is_dir(),
        (path / "s0.tar").size() > 0,
    ]


PAGES = (
    quickstart,
    task_encoder,
    default_batch,
    metadataset,
    restore_one,
    data_decoding,
    custom_sample_loader,
    custom_dataset,
    error_handling,
    wrappers,
    paths,
)

if __name__ == "__main__":
    folder, results = Path(sys.argv[1]), {}
    assert issubclass(DefaultTaskEncoder, TaskEncoder)
    for page in PAGES:
        with contextlib.redirect_stdout(sys.stderr):
            results[page.__name__] = page(folder)
    print(json.dumps(results))
