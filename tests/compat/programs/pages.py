"""What each page of Energon's documentation shows, written anew: run under energon_lite.compat, and by Energon itself.

Prints a line of JSON with a result for each page; none depends on an order. Argument: a folder with the data set ``data``.
"""

import contextlib
import json
import os
import shutil
import sys
import tarfile
from collections import Counter
from pathlib import Path

import torch
import yaml

from megatron.energon import (
    BaseWebdatasetFactory,
    Batch,
    BlendDataset,
    CaptioningSample,
    ConcatDataset,
    Cooker,
    DefaultTaskEncoder,
    LimitDataset,
    MapDataset,
    RepeatDataset,
    SampleDecoder,
    SkipSample,
    TaskEncoder,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    batch_list,
    batch_pad_stack,
    cooker,
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
    return [item for item, _ in zip(get_loader(dataset), range(count))]


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
    return {"epoch": sorted(key for batch in batches for key in batch.__key__), "val": seen, "type": type(val).__mro__[-1].__name__}


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
    return [batch for batch in get_loader(get_val_dataset(root / "data", batch_size=4, worker_config=ALONE, task_encoder=Captions()))]


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
        "splits": {"train": {"blend_epochized": [{"path": "data", "repetitions": 2}, {"path": "more", "repetitions": 1}]}},
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
    dataset = get_val_dataset(root / "subset.yaml", split_part="train", batch_size=4, worker_config=ALONE, task_encoder=Texts())
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
        found.append([batch for batch, _ in zip(again, range(4))])
    return found == [expected, expected]


def restore_one(root):
    train = get_train_dataset(
        root / "data", batch_size=3, shuffle_buffer_size=None, max_samples_per_sequence=None, worker_config=ALONE
    )
    loader = get_savable_loader(train)
    batches = [batch for batch, _ in zip(loader, range(4))]
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


@stateless
@cooker
def cook_text(sample):
    return TextSample(**basic_sample_keys(sample), text=sample["txt"])


@stateless
def cook_loud(sample):
    return TextSample(**basic_sample_keys(sample), text=sample["txt"].upper())


class Cooking(DefaultTaskEncoder):
    cookers = [Cooker(cook_loud, has_subflavors={"kind": "loud"}), Cooker(cook_text)]

    def encode_sample(self, sample):
        return sample.text

    def batch(self, samples):
        return samples


def crude_datasets(root):
    found = []
    for labels in ({}, {"kind": "loud"}):
        dataset = get_val_dataset(
            root / "data",
            batch_size=3,
            worker_config=ALONE,
            task_encoder=Cooking(),
            dataset_config="crude.yaml",
            subflavors=labels,
        )
        found.append([text for batch in get_loader(dataset) for text in batch])
    return found


def custom_sample_loader(root):
    dataset = get_val_dataset(root / "data", batch_size=3, worker_config=ALONE, task_encoder=Texts(), dataset_config="own_loader.yaml")
    return [text for batch in get_loader(dataset) for text in batch]


def custom_dataset(root):
    class Chats(Texts):
        def encode_sample(self, sample):
            return f"{type(sample).__name__} {sample.conversation}"

    dataset = get_val_dataset(root / "data", batch_size=3, worker_config=ALONE, task_encoder=Chats(), dataset_config="own_class.yaml")
    return [text for batch in get_loader(dataset) for text in batch]


def data_prep_api(root):
    folder = root / "prepared"
    folder.mkdir()
    for name in ("a0.tar", "a1.tar", "b0.tar"):
        shutil.copy(root / "data" / "s0.tar", folder / name)
        with tarfile.open(root / "data" / "s0.tar") as old, tarfile.open(folder / name, "w") as new:
            for member in old.getmembers():
                data = old.extractfile(member)
                member.name = f"{name[:2]}{member.name}"
                new.addfile(member, data)
    parts = BaseWebdatasetFactory.prepare_dataset(
        folder,
        ["a{0..1}.tar", "b0.tar"],
        split_parts_patterns=[("train", "a.*"), ("val", "b0.tar")],
        workers=1,
    )
    (folder / ".nv-meta" / "dataset.yaml").write_text(
        "sample_type:\n  __module__: megatron.energon\n  __class__: CaptioningSample\nfield_map:\n  image: png\n  caption: txt\n"
    )
    names = set(parts[0] if isinstance(parts, tuple) else parts)
    return [sorted(names), [len(list(get_loader(get_val_dataset(folder, split_part=split, batch_size=None, worker_config=ALONE)))) for split in ("train", "val")]]


def grouping(root):
    class Grouped(Texts):
        def batch_group_criterion(self, sample):
            return len(sample), None

    dataset = get_val_dataset(root / "data", batch_size=2, worker_config=ALONE, task_encoder=Grouped())
    batches = list(get_loader(dataset))
    return [all(len({len(text) for text in batch}) == 1 for batch in batches), sorted(text for batch in batches for text in batch)]


class Packing(Texts):
    def select_samples_to_pack(self, samples):
        return [samples[at : at + 2] for at in range(0, len(samples), 2)]

    @stateless
    def pack_selected_samples(self, samples):
        return "+".join(samples)


def packing(root):
    dataset = get_val_dataset(root / "data", batch_size=1, packing_buffer_size=4, worker_config=ALONE, task_encoder=Packing())
    packs = [pack for batch in get_loader(dataset) for pack in batch]
    return [max(pack.count("+") for pack in packs), sorted(text for pack in packs for text in pack.split("+"))]


def parallelism(root):
    seen = Counter()
    for rank in range(2):
        config = WorkerConfig(rank=rank, world_size=2, num_workers=0)
        dataset = get_val_dataset(root / "data", batch_size=2, worker_config=config, task_encoder=Texts())
        seen.update(text for batch in get_loader(dataset) for text in batch)
    return sorted(seen.items())


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
    return [path.name, meta.parent == path, (meta / "split.yaml").is_file(), meta.is_dir(), (path / "s0.tar").size() > 0]


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
    crude_datasets,
    custom_sample_loader,
    custom_dataset,
    data_prep_api,
    grouping,
    packing,
    parallelism,
    error_handling,
    wrappers,
    paths,
)

if __name__ == "__main__":
    folder, results = Path(sys.argv[1]), {}
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    assert issubclass(DefaultTaskEncoder, TaskEncoder)
    for page in PAGES:
        with contextlib.redirect_stdout(sys.stderr):
            results[page.__name__] = page(folder)
    print(json.dumps(results))
