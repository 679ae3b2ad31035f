"""Batches on their way to a GPU: what a training step waits for them, and pictures a second of each decoder.

First, raw pictures (uint8 ``[3, 336, 336]``) in batches of 64 MB, beside a step of some matrix products. The next step
is launched before the last one is waited for, as a training loop does. "step alone" takes the same batch each time;
"host" is the time that the loop's thread spends on a batch before it can launch the step.

* ``energon_lite``: ``get_savable_loader(...).to("cuda")``
* ``copied by hand``: the same loader without it, and ``.to("cuda")`` in the loop
* ``pinned``: torch's DataLoader with ``pin_memory=True``, and ``.to("cuda", non_blocking=True)`` in the loop

Second, JPEG of 1024 x 768 that become ``[3, 336, 336]``: decoded by workers, and by each decoder of the GPU that is
installed (``encode_on_device``).

    python tools/bench/to_device.py [--workers 8] [--runs 3]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import fresh_process, machine, spread, table, write_shards
from decoding import make_data

import energon_lite as lib
from energon_lite.extras.media import BatchImageDecoder, EncodedImages, batch_images
from energon_lite.storage import ImageSize, SampleDecoder

SIZE, RAW_BATCH, JPEG_BATCH, BATCHES = 336, 198, 64, 60
RAW_BYTES = 3 * SIZE * SIZE
#: File with one raw picture.
ONE = "one.bin"
RAW = ("step alone", "energon_lite", "copied by hand", "pinned")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--process", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        name, folder, workers = json.loads(arguments.process)
        print(json.dumps(steps(name, folder, workers) if name in RAW else pictures(name, folder, workers)))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder))
        rng = np.random.default_rng(0)
        raw = ({"bin": rng.integers(0, 256, RAW_BYTES, np.uint8).tobytes()} for _ in range(2 * RAW_BATCH))
        write_shards(Path(folder, "raw"), raw, 99, "ImageSample", {"image": "bin"})
        Path(folder, ONE).write_bytes(rng.integers(0, 256, RAW_BYTES, np.uint8).tobytes())
        print(f"{machine()}; {torch.cuda.get_device_name()}; {arguments.workers} workers")
        names = (*RAW, "by workers", *batch_images.BACKENDS)
        found: dict[str, list[Any]] = {name: [] for name in names}
        for _, name in itertools.product(range(arguments.runs), names):
            try:
                found[name].append(fresh_process(__file__, "--process", json.dumps([name, folder, arguments.workers])))
            except SystemExit as error:
                print(f"{name}: {str(error).strip().splitlines()[-1]}")
    rows = [
        [name, *(spread([run[key] for run in found[name]]) for key in ("median", "worst", "host"))]
        for name in RAW
        if found[name]
    ]
    print(table(["raw pictures, 64 MB a batch", "ms a step", "worst", "host"], rows))
    print(table(["JPEG", "pictures/s"], [[name, spread(found[name], 0)] for name in names[len(RAW) :] if found[name]]))


# -- raw pictures ----------------------------------------------------------------------------------------------------


class Raw(lib.TaskEncoder):
    @lib.stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> Any:
        return {"x": raw_picture(sample.image)}


def raw_picture(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(3, SIZE, SIZE)


def loader_of(path: str, batch_size: int, workers: int, encoder: lib.TaskEncoder) -> lib.SavableDataLoader:
    config = lib.WorkerConfig(rank=0, world_size=1, num_workers=workers)
    dataset = lib.get_train_dataset(
        path, batch_size=batch_size, worker_config=config, task_encoder=encoder, shuffle_buffer_size=None
    )
    return lib.get_savable_loader(dataset)


def ours(folder: str, workers: int) -> Iterator[torch.Tensor]:
    return (batch["x"] for batch in loader_of(f"{folder}/raw", RAW_BATCH, workers, Raw()).to("cuda"))


def by_hand(folder: str, workers: int) -> Iterator[torch.Tensor]:
    return (batch["x"].to("cuda") for batch in loader_of(f"{folder}/raw", RAW_BATCH, workers, Raw()))


class Repeated(torch.utils.data.Dataset[torch.Tensor]):
    """The picture of one file, again and again."""

    def __init__(self, path: Path):
        self.path = path

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return raw_picture(self.path.read_bytes())


def pinned(folder: str, workers: int) -> Iterator[torch.Tensor]:
    pictures = Repeated(Path(folder, ONE))
    loader = torch.utils.data.DataLoader(pictures, RAW_BATCH, num_workers=workers, pin_memory=True)
    return (batch.to("cuda", non_blocking=True) for batch in loader)


def alone(folder: str, workers: int) -> Iterator[torch.Tensor]:
    return itertools.repeat(torch.zeros(RAW_BATCH, 3, SIZE, SIZE, dtype=torch.uint8, device="cuda"))


def steps(name: str, folder: str, workers: int) -> dict[str, float]:
    """Milliseconds of a step: median, worst, and of the host for a batch."""
    torch.set_num_threads(1)
    make: dict[str, Callable[..., Iterator[torch.Tensor]]] = dict(zip(RAW, (alone, ours, by_hand, pinned), strict=True))
    stream, weight = make[name](folder, workers), torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    before, marks, host = torch.cuda.Event(), [], []
    for _ in range(BATCHES):
        began = time.perf_counter()
        batch = next(stream)
        host.append(time.perf_counter() - began)
        x = batch.flatten()[: 8192 * 4096].view(4096, 8192).to(torch.bfloat16)
        for _ in range(40):  # about 30 ms on an H200
            x = (x @ weight).clamp(-1, 1)
        before.synchronize()  # of the step before
        before = torch.cuda.Event()
        before.record()
        marks.append(time.perf_counter())
    seconds = [later - sooner for sooner, later in itertools.pairwise(marks)][BATCHES // 3 :]
    return {
        "median": 1e3 * statistics.median(seconds),
        "worst": 1e3 * max(seconds),
        "host": 1e3 * statistics.median(host[BATCHES // 3 :]),
    }


# -- JPEG ------------------------------------------------------------------------------------------------------------


class ByWorkers(lib.TaskEncoder):
    decoder = SampleDecoder(image_decode="torchrgb8", image_size=ImageSize(SIZE))

    def encode_batch(self, batch: Any) -> Any:
        return {"x": batch.image}


class OnDevice(lib.TaskEncoder):
    decoder = SampleDecoder(image_decode=None)
    device_decoder = BatchImageDecoder(ImageSize(SIZE))

    def encode_batch(self, batch: Any) -> Any:
        return {"x": EncodedImages(batch.image)}

    def encode_on_device(self, batch: Any) -> Any:
        return {"x": self.device_decoder(batch["x"], self.rng)}


def pictures(name: str, folder: str, workers: int) -> float:
    """Pictures a second, of a loop that only waits for each batch."""
    torch.set_num_threads(1)
    if name != "by workers":
        batch_images.BACKENDS.update({other: _absent for other in batch_images.BACKENDS if other != name})
    encoder = ByWorkers() if name == "by workers" else OnDevice()
    batches = iter(loader_of(f"{folder}/tars", JPEG_BATCH, workers, encoder).to("cuda"))
    for number in range(10 + BATCHES):
        if number == 10:
            torch.cuda.synchronize()
            began = time.perf_counter()
        assert next(batches)["x"].is_cuda
    torch.cuda.synchronize()
    if name != "by workers":
        assert encoder.device_decoder.name.startswith(name), encoder.device_decoder.name
    return BATCHES * JPEG_BATCH / (time.perf_counter() - began)


def _absent(device: torch.device) -> Any:
    raise ImportError("not measured here")


if __name__ == "__main__":
    main()
