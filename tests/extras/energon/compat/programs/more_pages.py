"""More pages of the documentation, for ``pages.py``: what changes samples, and what is made of data sets."""

import shutil
import tarfile
from collections import Counter

import torch
from megatron.energon import (
    BaseWebdatasetFactory,
    BlendDataset,
    ConcatDataset,
    Cooker,
    DefaultTaskEncoder,
    LimitDataset,
    MapDataset,
    RepeatDataset,
    SkipSample,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    get_loader,
    get_val_dataset,
    log_exception,
    stateless,
)
from megatron.energon.epathlib import EPath
from megatron.energon.errors import FatalSampleError
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
        "sample_type: {__module__: megatron.energon, __class__: CaptioningSample}\n"
        "field_map: {image: png, caption: txt}\n"
    )
    names = set(parts[0] if isinstance(parts, tuple) else parts)
    return [
        sorted(names),
        [
            len(list(get_loader(get_val_dataset(folder, split_part=split, batch_size=None, worker_config=ALONE))))
            for split in ("train", "val")
        ],
    ]


def grouping(root):
    class Grouped(Texts):
        def batch_group_criterion(self, sample):
            return len(sample), None

    dataset = get_val_dataset(root / "data", batch_size=2, worker_config=ALONE, task_encoder=Grouped())
    batches = list(get_loader(dataset))
    return [
        all(len({len(text) for text in batch}) == 1 for batch in batches),
        sorted(text for batch in batches for text in batch),
    ]


class Packing(Texts):
    def select_samples_to_pack(self, samples):
        return [samples[at : at + 2] for at in range(0, len(samples), 2)]

    @stateless
    def pack_selected_samples(self, samples):
        return "+".join(samples)


def packing(root):
    dataset = get_val_dataset(
        root / "data", batch_size=1, packing_buffer_size=4, worker_config=ALONE, task_encoder=Packing()
    )
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
    return [
        path.name,
        meta.parent == path,
        (meta / "split.yaml").is_file(),
        meta.is_dir(),
        (path / "s0.tar").size() > 0,
    ]


PAGES = (
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
