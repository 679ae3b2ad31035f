"""JPEG of 1024 x 768 to 336 x 336 in batches: processor time for a picture, of energon_lite beside other ways.

The pictures are photographs (scikit-learn's and matplotlib's), enlarged to 1024 x 768, JPEG of quality 85, in tars.
Each figure is a fresh process with one torch thread, in which the contender makes batches of 32 tensors uint8
``[32, 3, 336, 336]``; the contenders take turns. Counted is the processor time of the process and its workers between
two batches, because other work on the machine changes it less; "rate" is pictures for a second of it, which is what a
core does. Worst is the slowest batch of the process, by the clock.

* ``energon_lite``: ``SampleDecoder(image_decode="torchrgb8", image_size=ImageSize(336))``
* ``energon_lite, in full``: the same without ``image_size``, resized in ``encode_sample``
* ``pillow``: a DataLoader whose ``__getitem__`` opens, converts and resizes with Pillow
* ``torchcodec``: the same with torchcodec's ``decode_jpeg`` and torch's antialiased resize
* ``webdataset``: ``.decode("pil")``, then Pillow's resize; ``webdataset torchrgb8``: its tensors, then torch's resize
* ``torchdata``: ``StatefulDataLoader`` with torchvision's ``decode_jpeg`` and ``v2.functional.resize``
* ``litdata``: ``StreamingDataset`` of JPEG fields, which it decodes itself, and ``v2.functional.resize``

    python -m venv peers && peers/bin/pip install torch torchvision torchcodec webdataset torchdata litdata pillow numpy
    python tools/bench/decoding.py --peers peers/bin/python [--runs 5] [--batches 12] [--only pillow] [--workers 0]
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BATCH, SIZE, PICTURES = 32, 336, 96
#: Seconds for one figure.
LIMIT = 300


def main() -> None:
    from common import machine, spread, table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--only", choices=CONTENDERS, action="append")
    parser.add_argument("--workers", type=int, action="append")
    parser.add_argument("--peers", default=sys.executable, help="an interpreter that has the other libraries")
    arguments = parser.parse_args()
    settings = list(itertools.product(arguments.only or CONTENDERS, arguments.workers or (0, 2)))
    found: dict[tuple[str, int], list[dict[str, float]]] = {setting: [] for setting in settings}
    with tempfile.TemporaryDirectory() as folder:
        size = make_data(Path(folder))
        ask(arguments.peers, {"convert": folder})
        print(f"{machine()}; {size / 1000:.0f} kB a picture")
        for _ in range(arguments.runs):
            for name, workers in settings:
                interpreter = sys.executable if name.startswith("energon_lite") else arguments.peers
                what = {"name": name, "folder": folder, "workers": workers, "batches": arguments.batches}
                if (answer := ask(interpreter, what)) is not None:
                    found[name, workers].append(answer)
    rows = []
    for (name, workers), measured in found.items():
        ours = [run["milliseconds"] for run in found.get(("energon_lite", workers), measured)]
        times = [run["milliseconds"] for run in measured]
        ratios = [theirs / own for theirs, own in zip(times, ours, strict=False)]
        cells = (
            [spread(times), f"{1000 / statistics.median(times):.0f}", spread(ratios)] if times else ["failed", "", ""]
        )
        rows.append([name, workers, *cells, spread([run["worst"] for run in measured], 0) if times else ""])
    print(table(["contender", "workers", "ms a picture", "rate", "ratio to energon_lite", "worst batch ms"], rows))


def ask(interpreter: str, request: dict[str, Any]) -> Any:
    """What a fresh process measured; None: it failed, and said why."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [interpreter, __file__, "--process", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=LIMIT)
    if done.returncode:
        print(f"{request}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def make_data(folder: Path) -> float:
    """Write the pictures; returns their mean size in bytes."""
    import numpy as np
    from common import write_shards
    from matplotlib.cbook import get_sample_data
    from PIL import Image
    from sklearn.datasets import load_sample_images

    photographs = [*map(Image.fromarray, load_sample_images().images)]
    photographs.append(Image.open(get_sample_data("grace_hopper.jpg", asfileobj=False)).convert("RGB"))
    rng, pictures = np.random.default_rng(0), []
    for number in range(PICTURES):
        whole, stream = photographs[number % 3], io.BytesIO()
        left, top = rng.integers(0, whole.width // 8), rng.integers(0, whole.height // 8)
        box = (left, top, left + whole.width * 7 // 8, top + whole.height * 7 // 8)
        whole.resize((1024, 768), Image.Resampling.LANCZOS, box).save(stream, "JPEG", quality=85)
        pictures.append(stream.getvalue())
    write_shards(folder / "tars", ({"jpg": data} for data in pictures), 48, "ImageSample", {"image": "jpg"})
    (folder / "files").mkdir()
    for number, data in enumerate(pictures):
        (folder / "files" / f"{number:04d}.jpg").write_bytes(data)
    return statistics.mean(map(len, pictures))


def convert(folder: str) -> float:
    """Write the pictures in the format of litdata."""
    try:
        from litdata.streaming.cache import Cache
        from PIL import Image
    except ImportError:
        return 0.0
    cache = Cache(f"{folder}/lit", chunk_size=48)
    for number, path in enumerate(sorted(Path(folder, "files").glob("*.jpg"))):
        cache[number] = {"image": Image.open(path)}  # stored as the JPEG that it is
    cache.done()
    cache.merge()
    return 0.0


# -- contenders ------------------------------------------------------------------------------------------------------


def energon_lite(folder: str, workers: int, in_full: bool = False) -> Iterator[Any]:
    import energon_lite as lib
    from energon_lite.storage import ImageSize, SampleDecoder

    class Encoder(lib.TaskEncoder):
        decoder = SampleDecoder(image_decode="torchrgb8", image_size=None if in_full else ImageSize(SIZE))

        @lib.stateless(restore_seeds=False)
        def encode_sample(self, sample: Any) -> Any:
            if in_full:
                sample.image = resized(sample.image)
            return sample

    config = lib.WorkerConfig(rank=0, world_size=1, num_workers=workers)
    dataset = lib.get_train_dataset(
        f"{folder}/tars", batch_size=BATCH, worker_config=config, task_encoder=Encoder(), shuffle_buffer_size=None
    )
    return (batch.image for batch in lib.get_savable_loader(dataset))


def energon_lite_in_full(folder: str, workers: int) -> Iterator[Any]:
    return energon_lite(folder, workers, in_full=True)


def resized(image: Any) -> Any:
    import torch

    size = (SIZE, SIZE)
    return torch.nn.functional.interpolate(image[None], size, mode="bicubic", antialias=True)[0]


def by_pillow(data: bytes) -> Any:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return channels_first(image.convert("RGB").resize((SIZE, SIZE)))


def channels_first(image: Any) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def by_torchcodec(data: bytes) -> Any:
    from torchcodec.decoders import decode_jpeg

    return resized(decode_jpeg(data))


def by_torchvision(data: bytes) -> Any:
    import numpy as np
    import torch
    from torchvision.io import decode_jpeg
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2.functional import resize

    image = decode_jpeg(torch.from_numpy(np.frombuffer(data, np.uint8).copy()))
    return resize(image, [SIZE, SIZE], InterpolationMode.BICUBIC, antialias=True)


class Files:
    """Pictures as files, decoded by a function; a map-style data set as users write it."""

    def __init__(self, folder: str, decode: Callable[[bytes], Any]):
        self.paths, self.decode = sorted(Path(folder, "files").glob("*.jpg")), decode

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self.decode(self.paths[index].read_bytes())


def repeated(loader: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def pillow(folder: str, workers: int, decode: Callable[[bytes], Any] = by_pillow) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    files: Any = Files(folder, decode)
    options = {"persistent_workers": True} if workers else {}
    return repeated(DataLoader(files, BATCH, shuffle=True, num_workers=workers, **options))


def torchcodec(folder: str, workers: int) -> Iterator[Any]:
    return pillow(folder, workers, by_torchcodec)


def torchdata(folder: str, workers: int) -> Iterator[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    files, options = Files(folder, by_torchvision), {"persistent_workers": True} if workers else {}
    return repeated(StatefulDataLoader(files, BATCH, shuffle=True, num_workers=workers, **options))


def webdataset(folder: str, workers: int, form: str = "pil") -> Iterator[Any]:
    import webdataset as wds
    from torch.utils.data import DataLoader, default_collate

    last: Callable[[Any], Any] = _pil_to_size if form == "pil" else _first_to_size
    shards = sorted(map(str, Path(folder, "tars").glob("*.tar")))
    stream = wds.WebDataset(shards, shardshuffle=2, nodesplitter=None, empty_check=False).repeat().shuffle(32)
    stream = stream.decode(form).to_tuple("jpg").map(last).batched(BATCH, collation_fn=default_collate, partial=False)
    return iter(DataLoader(stream, batch_size=None, num_workers=workers))


def _pil_to_size(sample: Any) -> Any:
    return channels_first(sample[0].resize((SIZE, SIZE)))


def _first_to_size(sample: Any) -> Any:
    return resized(sample[0])


def webdataset_torchrgb8(folder: str, workers: int) -> Iterator[Any]:
    return webdataset(folder, workers, "torchrgb8")


def litdata(folder: str, workers: int) -> Iterator[Any]:
    from litdata import StreamingDataLoader, StreamingDataset
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2.functional import pil_to_tensor, resize

    class Set(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            image = super().__getitem__(index)["image"]
            tensor = image if hasattr(image, "dtype") else pil_to_tensor(image.convert("RGB"))
            return resize(tensor, [SIZE, SIZE], InterpolationMode.BICUBIC, antialias=True)

    loader = StreamingDataLoader(Set(f"{folder}/lit", shuffle=True), batch_size=BATCH, num_workers=workers)
    return repeated(loader)


CONTENDERS = {
    "energon_lite": energon_lite,
    "energon_lite, in full": energon_lite_in_full,
    "pillow": pillow,
    "torchcodec": torchcodec,
    "webdataset": webdataset,
    "webdataset torchrgb8": webdataset_torchrgb8,
    "torchdata": torchdata,
    "litdata": litdata,
}


# -- one process -----------------------------------------------------------------------------------------------------


def measure(name: str, folder: str, workers: int, batches: int) -> dict[str, float]:
    """Milliseconds of processor time for a picture, and of the slowest batch by the clock."""
    import torch

    torch.set_num_threads(1)
    stream = CONTENDERS[name](folder, workers)
    for _ in range(3):
        assert tuple(next(stream).shape) == (BATCH, 3, SIZE, SIZE)
    before, worst = processor_time(), 0.0
    for _ in range(batches):
        start = time.perf_counter()
        next(stream)
        worst = max(worst, time.perf_counter() - start)
    return {"milliseconds": 1000 * (processor_time() - before) / (batches * BATCH), "worst": 1000 * worst}


def processor_time() -> float:
    """Seconds that this process and its descendants have used."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        number = int(path.parent.name)
        parents[number], ticks[number] = int(fields[1]), int(fields[11]) + int(fields[12])
    mine = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in mine} - mine:
        mine |= more
    others = sum(ticks[number] for number in mine - {os.getpid()})
    return usage.ru_utime + usage.ru_stime + others / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    if sys.argv[1:2] != ["--process"]:
        sys.exit(main())
    request = json.loads(sys.argv[2])
    print(json.dumps(convert(request["convert"]) if "convert" in request else measure(**request)), flush=True)
    os._exit(0)  # some of them take seconds to stop their workers
