"""One loader of each library over the same samples, and how many samples a second it hands out.

Run by ``loader.py``, a fresh interpreter for each figure, in which the library is installed. What is compared is the
same for all: ``image-raw`` and ``tokens-raw`` hand out bytes, ``image-decoded`` calls one shared function (Pillow, RGB,
128 x 128, uint8) and stacks, ``tokens-decoded`` makes tensors of ``.npy`` and pads them.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH = 32
SHUFFLE = 1000


# -- what is done to samples -----------------------------------------------------------------------------------------


def decode_image(data: bytes) -> torch.Tensor:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return torch.from_numpy(np.array(image.convert("RGB").resize((128, 128)))).permute(2, 0, 1)


def decode_image_quickly(data: bytes) -> torch.Tensor:
    import simplejpeg

    pixels = torch.from_numpy(simplejpeg.decode_jpeg(data, "RGB")).permute(2, 0, 1)
    return torch.nn.functional.interpolate(pixels[None], (128, 128), mode="bicubic", antialias=True)[0]


def decode_tokens(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.load(io.BytesIO(data)))


def is_decoded(case: str) -> bool:
    """Whether samples are decoded; else their bytes are handed out."""
    return "decoded" in case or "fast" in case


def finish(case: str, sample: dict[str, Any]) -> Any:
    """A sample as its batch needs it. (LitData hands out memoryviews, which workers could not send.)"""
    decoded = is_decoded(case)
    if case.startswith("image"):
        return decode_image(sample["jpg"]) if decoded else bytes(sample["jpg"]), bytes(sample["txt"])
    return decode_tokens(sample["npy"]) if decoded else bytes(sample["npy"])


class Collate:
    def __init__(self, case: str):
        self.case = case

    def __call__(self, samples: list[Any]) -> Any:
        if not is_decoded(self.case):
            return samples
        if self.case.startswith("tokens"):
            return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
        return torch.stack([sample[0] for sample in samples]), [sample[1] for sample in samples]


class Finish:
    def __init__(self, case: str):
        self.case = case

    def __call__(self, sample: dict[str, Any]) -> Any:
        return finish(self.case, sample)


# -- libraries -------------------------------------------------------------------------------------------------------


def energon_lite(folder: Path, case: str, workers: int) -> Iterator[Any]:
    from energon_lite.extras import energon as lib

    return _energon(lib, folder, case, workers)


def megatron_energon(folder: Path, case: str, workers: int) -> Iterator[Any]:
    from megatron import energon as lib

    return _energon(lib, folder, case, workers)


def _energon(lib: Any, folder: Path, case: str, workers: int) -> Iterator[Any]:
    data, _, form = case.partition("-")
    ours = lib.__name__ == "energon_lite.extras.energon"
    base: Any = lib.DefaultTaskEncoder

    class Raw(base):  # type: ignore[misc]
        decoder = None

    class User(Raw):
        def encode_sample(self, sample: Any) -> Any:
            return sample

    class Pure(Raw):
        @lib.stateless(restore_seeds=False)
        def encode_sample(self, sample: Any) -> Any:
            return sample

    collate = Collate(case)

    def finished(sample: Any) -> Any:
        """What the peers do to a sample."""
        parts = {"jpg": sample.image, "txt": sample.caption} if data == "image" else {"npy": sample.text}
        return finish(case, parts)

    class InBatch(Raw):
        def batch(self, samples: list[Any]) -> Any:
            return collate([finished(sample) for sample in samples])

    class InBoth(Raw):
        def encode_sample(self, sample: Any) -> Any:
            return finished(sample)

        def batch(self, samples: list[Any]) -> Any:
            return collate(samples)

    class InBothPure(InBatch):
        @lib.stateless(restore_seeds=False)
        def encode_sample(self, sample: Any) -> Any:
            return finished(sample)

        batch = InBoth.batch

    class Images(Raw):
        def encode_sample(self, sample: Any) -> Any:
            decode = decode_image_quickly if form == "fast" else decode_image
            return {"image": decode(sample.image), "caption": sample.caption}

        def batch(self, samples: list[Any]) -> Any:
            return torch.stack([sample["image"] for sample in samples]), [sample["caption"] for sample in samples]

    class Tokens(Raw):
        if ours:
            decoder = lib.SampleDecoder()  # its own way with .npy

        def encode_sample(self, sample: Any) -> Any:
            return torch.from_numpy(sample.text) if ours else decode_tokens(sample.text)

        def batch(self, samples: list[Any]) -> Any:
            return lib.batch_pad_stack(samples) if ours else torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)

    encoders = {
        "raw": Raw,
        "user": User,
        "pure": Pure,
        "batch": InBatch,
        "both": InBoth,
        "both-pure": InBothPure,
        "decoded-batch": InBatch,
        "fast": Images,
        "decoded": Images if data == "image" else Tokens,
    }
    dataset = lib.get_train_dataset(
        str(folder / data),
        batch_size=BATCH,
        shuffle_buffer_size=None if form == "full" else SHUFFLE,
        max_samples_per_sequence=None if form == "full" else 100,
        worker_config=lib.WorkerConfig(rank=0, world_size=1, num_workers=workers),
        task_encoder=encoders.get(form, Raw)(),
    )
    return iter(lib.get_savable_loader(dataset))


def webdataset(folder: Path, case: str, workers: int) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    return iter(DataLoader(_web(folder, case), batch_size=None, num_workers=workers))


def torchdata(folder: Path, case: str, workers: int) -> Iterator[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return iter(StatefulDataLoader(_web(folder, case), batch_size=None, num_workers=workers))


def _web(folder: Path, case: str) -> Any:
    import webdataset as wds

    shards = sorted(str(path) for path in (folder / case.partition("-")[0]).glob("*.tar"))
    stream = wds.WebDataset(shards, shardshuffle=100, nodesplitter=None).repeat().shuffle(SHUFFLE)
    return stream.map(Finish(case)).batched(BATCH, collation_fn=Collate(case))


def streaming(folder: Path, case: str, workers: int) -> Iterator[Any]:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    class Set(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            return finish(case, super().__getitem__(index))

    path = str(folder / f"mds-{case.partition('-')[0]}")
    dataset = Set(local=path, shuffle=True, shuffle_algo="py1e", shuffle_block_size=SHUFFLE, batch_size=BATCH)
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=Collate(case))
    return itertools.chain.from_iterable(itertools.repeat(loader))


def litdata(folder: Path, case: str, workers: int) -> Iterator[Any]:
    from litdata import StreamingDataLoader, StreamingDataset

    class Set(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            return finish(case, super().__getitem__(index))

    dataset = Set(str(folder / f"lit-{case.partition('-')[0]}"), shuffle=True)
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=Collate(case))
    return itertools.chain.from_iterable(itertools.repeat(loader))


def bound(folder: Path, case: str, workers: int) -> Iterator[Any]:
    """What one core can do at best: mapped slices in a random order; or decoding and collating alone."""
    import mmap
    import random

    data = case.partition("-")[0]
    maps, places = [], []
    for path in sorted((folder / data).glob("*.tar")):
        with path.open("rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        places += [(len(maps) - 1, *place) for place in json.loads(path.with_suffix(".places").read_text())]
    random.Random(0).shuffle(places)
    names, raw = ("jpg", "txt") if data == "image" else ("npy",), not is_decoded(case)
    collate, keep = Collate(case), 1 << 62
    if not raw:
        places, keep = places[:2000], 2000
    ready = [] if raw else [_slices(maps, place, names) for place in places]
    while True:
        for start in range(0, min(len(places), keep) - BATCH, BATCH):
            if raw:
                yield [_slices_raw(maps[shard], rest) for shard, *rest in places[start : start + BATCH]]
            else:
                yield collate([finish(case, sample) for sample in ready[start : start + BATCH]])


def _slices_raw(memory: Any, rest: list[int]) -> Any:
    if len(rest) == 2:
        return memory[rest[0] : rest[1]]
    return memory[rest[0] : rest[1]], memory[rest[2] : rest[3]]


def _slices(maps: list[Any], place: tuple[int, ...], names: tuple[str, ...]) -> dict[str, bytes]:
    shard, *rest = place
    return {name: maps[shard][rest[2 * i] : rest[2 * i + 1]] for i, name in enumerate(names)}


# -- preparing what the others read ----------------------------------------------------------------------------------


def convert(folder: Path) -> float:
    """Write the samples in the formats of mosaicml-streaming and litdata."""
    import webdataset as wds
    from litdata.streaming.cache import Cache
    from streaming import MDSWriter

    for data, names, chunk in (("image", ("jpg", "txt"), 1000), ("tokens", ("npy",), 10_000)):
        shards = sorted(str(path) for path in (folder / data).glob("*.tar"))
        with MDSWriter(
            out=str(folder / f"mds-{data}"), columns=dict.fromkeys(names, "bytes"), size_limit=1 << 24
        ) as out:
            for sample in wds.WebDataset(shards, shardshuffle=False):
                out.write({name: sample[name] for name in names})
        cache = Cache(str(folder / f"lit-{data}"), chunk_size=chunk)
        for index, sample in enumerate(wds.WebDataset(shards, shardshuffle=False)):
            cache[index] = {name: sample[name] for name in names}
        cache.done()
        cache.merge()
    return 0.0


def measure(library: str, folder: str, case: str, workers: int, seconds: float) -> dict[str, float]:
    """Samples per second, also of processor time of all processes, and the longest step in ms, after the first batches;
    seconds to the first one, and MiB of all processes at the end."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    batches = globals()[library](Path(folder), case, workers)
    next(batches)
    first = time.perf_counter() - start
    for _ in range(20):
        next(batches)
    longest = 0.0
    used = processor_seconds()
    done, start = 0, time.perf_counter()
    last = start
    while (elapsed := last - start) < seconds:
        for _ in range(8):
            next(batches)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        done += 8 * BATCH
    used = max(processor_seconds() - used, 1e-9)
    found = {"rate": done / elapsed, "per_cpu": done / used, "longest": longest * 1000}
    return found | {"first": first, "pss": proportional_mib()}


def own_processes() -> set[int]:
    """This process and its descendants."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    mine = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return mine


def processor_seconds() -> float:
    """Processor time of this process and its descendants, ended ones included, in the system and outside."""
    ticks = 0
    for process in own_processes():
        with suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def proportional_mib() -> float:
    """Memory of this process and its descendants; a page that n processes share counts 1/n in each."""
    total = 0
    for process in own_processes():
        with suppress(OSError):
            total += int(Path(f"/proc/{process}/smaps_rollup").read_text().split("Pss:")[1].split()[0])
    return total / 1024


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    print(json.dumps(convert(Path(request["folder"])) if "convert" in request else measure(**request)), flush=True)
    os._exit(0)  # some of them take seconds to stop their workers
