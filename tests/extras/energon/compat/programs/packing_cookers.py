"""A packing encoder with cookers of its own, and the script that writes its data: crude shards by webdataset, indexed
by Energon's functions and checked by loading one sample, then packed. Validation is wrapped to a number of batches, and
the state of all ranks is in the trainer's checkpoint. Run under energon_lite.extras.energon, and by
Energon.

Prints a line of JSON. Arguments: a folder in which the data are made.
"""

import bisect
import io
import json
import sys
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import webdataset as wds
import yaml
from megatron.energon import (
    Batch,
    Cooker,
    DefaultTaskEncoder,
    LimitDataset,
    RepeatDataset,
    Sample,
    StandardWebdatasetFactory,
    VQASample,
    WorkerConfig,
    basic_sample_keys,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
    stateless,
)
from megatron.energon.dataset_config import load_config
from megatron.energon.epathlib import EPath
from megatron.energon.flavors import BaseWebdatasetFactory
from megatron.energon.flavors.webdataset.config import MAIN_FOLDER_NAME

ROOM = 48


@dataclass
class Turns(Sample):
    """Turns of a talk, with or without a picture."""

    messages: list
    media: list | None = None


@dataclass
class Encoded(Sample):
    """Tokens of a sample."""

    tokens: torch.Tensor
    total_len: int
    kind: str


@dataclass
class Packed(Sample):
    """Samples in one sequence."""

    tokens: torch.Tensor
    cu_lengths: list
    kinds: list


@dataclass
class PackedBatch(Batch):
    """Sequences of one length."""

    tokens: torch.Tensor
    cu_lengths: list
    kinds: list


@stateless
def cook_turns(sample: dict) -> Turns:
    about = sample["json"]
    media = [sample[name] for name in about["name"]] if about["media"] != "text" else None
    return Turns(**basic_sample_keys(sample), messages=about["texts"], media=media)


@stateless
def cook_questions(sample: dict) -> VQASample:
    question, answer = (one["content"] for one in sample["json"]["texts"])
    return VQASample(**basic_sample_keys(sample), image=None, context=question, answers=answer, answer_weights=None)


class Packer(DefaultTaskEncoder[Sample, Encoded, PackedBatch, dict]):
    """Talks and questions, packed into sequences of at most ``ROOM`` tokens."""

    cookers = [
        Cooker[Sample](cook_turns, has_subflavors={"sample_type": "talk"}),
        Cooker[Sample](cook_questions, has_subflavors={"sample_type": "question"}),
    ]

    def text_of(self, sample: Sample) -> str:
        if isinstance(sample, VQASample):
            return f"{sample.context}|{sample.answers}"
        return "|".join(f"{one['role'][0]}:{one['content']}" for one in sample.messages) + "^" * len(sample.media or [])

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: Sample) -> Encoded:
        tokens = torch.tensor([ord(one) for one in self.text_of(sample)])[:ROOM]
        return Encoded(
            __key__=sample.__key__,
            __restore_key__=sample.__restore_key__,
            __subflavors__=sample.__subflavors__,
            tokens=tokens,
            total_len=len(tokens),
            kind=type(sample).__name__,
        )

    def select_samples_to_pack(self, samples: list) -> list:
        """Longest first, each with the largest of the others that still fit."""
        left = sorted(samples, key=lambda one: (one.total_len, one.__key__))
        packs = []
        while left:
            pack = [left.pop()]
            room = ROOM - pack[0].total_len
            while (place := bisect.bisect_right([one.total_len for one in left], room)) > 0:
                pack.append(left.pop(place - 1))
                room -= pack[-1].total_len
            packs.append(pack)
        return packs

    @stateless
    def pack_selected_samples(self, samples: list) -> Packed:
        ends = list(accumulate((one.total_len for one in samples), initial=0))
        return Packed(
            __key__=",".join(one.__key__ for one in samples),
            __restore_key__=(),
            __subflavors__=samples[0].__subflavors__,
            tokens=torch.nn.functional.pad(torch.cat([one.tokens for one in samples]), (0, ROOM - ends[-1])),
            cu_lengths=ends,
            kinds=sorted({one.kind for one in samples}),
        )

    def batch(self, samples: list) -> PackedBatch:
        return PackedBatch(
            __key__=[one.__key__ for one in samples],
            __restore_key__=[one.__restore_key__ for one in samples],
            tokens=torch.stack([one.tokens for one in samples]),
            cu_lengths=[one.cu_lengths for one in samples],
            kinds=[one.kinds for one in samples],
        )

    def encode_batch(self, batch: PackedBatch) -> dict:
        return {"keys": batch.__key__, "tokens": batch.tokens.tolist(), "ends": batch.cu_lengths, "kinds": batch.kinds}


def write(root: Path, kind: str, count: int) -> set:
    """Write shards of a kind of samples, and index them."""
    root.mkdir(parents=True)
    with wds.ShardWriter(f"{root}/part-%02d.tar", maxcount=6, verbose=0) as writer:
        for number in range(count):
            says = [{"role": "user", "content": "x" * (number % 7 + 1)}, {"role": "assistant", "content": f"{number}"}]
            sample: dict = {"__key__": f"{kind}{number:03d}"}
            about: dict = {"texts": says, "media": "text"}
            if kind == "talk" and number % 3 == 0:
                sample["0_a.bin"], about = bytes([number]), {**about, "media": "image", "name": ["0_a.bin"]}
            writer.write({**sample, "json": json.dumps(about).encode()})
    path = EPath(str(root))
    (path / MAIN_FOLDER_NAME).mkdir()
    shards = sorted(str(one.relative_to(path)) for one in path.glob("**/*.tar"))
    document = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset", "subflavors": {"sample_type": kind}}
    with (path / MAIN_FOLDER_NAME / "dataset.yaml").open("w") as file:
        yaml.dump(document, file, sort_keys=False)
    options: dict = {"tar_index_only": False, "workers": 2, "shuffle_seed": None}
    ratio = [("train", 1.0), ("val", 1.0), ("test", 0)]
    return BaseWebdatasetFactory.prepare_dataset(path, shards, split_parts_ratio=ratio, **options)


def check(root: Path) -> dict:
    """One sample, as training loads it."""
    path = EPath(str(root))
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    given = {"path": path, "split_part": "train", "training": False, "worker_config": config}
    document = path / MAIN_FOLDER_NAME / "dataset.yaml"
    factory = load_config(document, default_kwargs=given, default_type=StandardWebdatasetFactory)
    sample = next(iter(get_loader(factory.build())))
    return {key: len(sample[key]) for key in sorted(sample.keys()) if not key.startswith("_")}


def blend(root: Path) -> Path:
    parts = {
        "train": {"blend": [{"weight": 2, "path": "talk"}, {"weight": 1, "path": "question"}]},
        "val": {"blend_epochized": [{"repetitions": 1, "path": name} for name in ("talk", "question")]},
    }
    document = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": parts}
    (root / "blend.yaml").write_text(yaml.safe_dump(document))
    return root / "blend.yaml"


def main(folder: str) -> None:
    root = Path(folder)
    found: dict = {"library": get_train_dataset.__module__.split(".")[0]}
    found["parts"] = {kind: sorted(write(root / kind, kind, 24)) for kind in ("talk", "question")}
    found["checked"] = {kind: check(root / kind) for kind in ("talk", "question")}
    path = blend(root)
    for workers in (0, 2):
        config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
        options: dict = {"batch_size": 2, "packing_buffer_size": 12, "task_encoder": Packer(), "worker_config": config}
        val = get_val_dataset(str(path), split_part="val", **options)
        found[f"val, {workers} workers"] = list(get_loader(val))
        found["length"] = len(get_loader(val))
        ((talks, source),) = get_val_datasets(str(root / "talk"), split_part="val", **options)
        repeated = RepeatDataset(talks, worker_config=config)
        limited = get_loader(LimitDataset(repeated, length=5, worker_config=config, reset_after_epoch=True))
        found[f"limited, {workers} workers"] = [str(source.paths[0]), *([*limited] for _ in range(2))]
        options |= {"shuffle_buffer_size": 100, "max_samples_per_sequence": None}
        train, again = (get_savable_loader(get_train_dataset(str(path), **options)) for _ in range(2))
        found["torch loader"] = isinstance(train, torch.utils.data.DataLoader)
        batches = iter(train)
        seen = [next(batches) for _ in range(4)]
        checkpoint = io.BytesIO()
        torch.save({"dataloader_state": train.save_state_global(global_dst_rank=0)}, checkpoint)
        after = [next(batches) for _ in range(3)]
        checkpoint.seek(0)
        again.restore_state_global(torch.load(checkpoint, weights_only=False)["dataloader_state"], src_rank=None)
        resumed = iter(again)
        found[f"train, {workers} workers"] = {
            "exact": [next(resumed) for _ in range(3)] == after,
            "sequences": {len(row) for batch in seen for row in batch["tokens"]} == {ROOM},
            "kinds": sorted({kind for batch in seen for kinds in batch["kinds"] for kind in kinds}),
        }
    print(json.dumps(found))
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
