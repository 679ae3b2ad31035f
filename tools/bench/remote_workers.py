"""Workers behind TCP, and of Ray, beside local ones: samples a second, and the trainer's processor time per batch.

``images``: JPEGs of 512 x 384 are decoded and resized to 224 x 224, 32 in a batch; one worker of each kind, in turn.
``sleep``: jobs of 10 ms, or 200 ms, that need no processor; so many workers, and twice as many. ``slow``: one sample in
200 takes a second instead of 5 ms; four workers. At the mean's bound it would be 386 samples/s: 43 of the 8,000
measured samples are slow. ``slow, as before`` has as many batches ahead as ``prefetch_factor`` says. Servers and actors
are on this machine, behind loopback.

    python tools/bench/remote_workers.py --runs 3
    python tools/bench/remote_workers.py --ray
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, make_dataset, spread, table, write_shards

from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.extras.remote_workers import JobServer, RayWorkers, TcpWorkers
from energon_lite.loading.executors import worker_pool


class Decoded(TaskEncoder):
    """Pictures of one size."""

    def encode_sample(self, sample: Any) -> Any:
        from torch.nn.functional import interpolate

        image = interpolate(sample.image[None], (224, 224), mode="bilinear", antialias=True)[0]
        sample.image = (image * 255).byte()
        return sample


class Sleeping(TaskEncoder):
    """Takes a time for a batch; one sample in 200 takes longer, if asked for.

    Args:
        batch: seconds for a batch.
        slow: seconds for a slow sample.
    """

    def __init__(self, batch: float, slow: float = 0.0):
        self.seconds, self.slow = batch, slow

    def encode_sample(self, sample: Any) -> Any:
        if self.slow:
            time.sleep(self.slow if int(sample.__key__) % 200 == 7 else 0.005)
        return sample

    def encode_batch(self, batch: Any) -> Any:
        time.sleep(self.seconds)
        return batch


@contextmanager
def _workers(kind: str, make: Callable[[WorkerConfig], Any], count: int) -> Iterator[WorkerConfig]:
    """A configuration with so many workers of a kind."""
    if kind == "local":
        yield WorkerConfig(0, 1, count)
    elif kind == "ray":
        yield WorkerConfig(0, 1, workers=RayWorkers(count, count, {"CPU": 0}))
    else:
        server = JobServer(make(WorkerConfig(0, 1)), "127.0.0.1", 0, workers=count)
        process = multiprocessing.get_context("fork").Process(target=server.run)
        process.start()
        server.close()
        try:
            yield WorkerConfig(0, 1, workers=TcpWorkers([server.address]))
        finally:
            process.kill()
            process.join()


def _rate(make: Callable[[WorkerConfig], Any], kind: str, count: int, batches: int, first: int) -> tuple[float, float]:
    """Batches a second, and milliseconds of the trainer's processor time for each, behind the ``first`` ones."""
    with _workers(kind, make, count) as config, get_savable_loader(make(config)) as loader:
        iterator = iter(loader)
        for _ in range(first):
            next(iterator)
        while kind != "local" and len(loader._workers.executor()._workers) < count:  # type: ignore[attr-defined]
            next(iterator)
        began, used = time.perf_counter(), time.process_time()
        for _ in range(batches):
            next(iterator)
        used, seconds = time.process_time() - used, time.perf_counter() - began
    return batches / seconds, 1000 * used / batches


def _pictures(folder: Path, count: int) -> Path:
    from PIL import Image

    def samples() -> Iterator[dict[str, bytes]]:
        draw = np.random.default_rng(0)
        for _ in range(count):
            small = Image.fromarray(draw.integers(0, 256, (24, 32, 3), dtype=np.uint8))
            stream = io.BytesIO()
            small.resize((512, 384), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
            yield {"jpg": stream.getvalue(), "txt": b"a picture"}

    return write_shards(folder, samples(), 1000, "CaptioningSample", {"image": "jpg", "caption": "txt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--only", default="", help="the cases that begin so")
    asked = parser.parse_args()
    kinds = ["local", "tcp", *(["ray"] if asked.ray else [])]
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        pictures, texts = _pictures(Path(name, "pictures"), 400), make_dataset(Path(name, "texts"), 4000)
        cases: dict[str, tuple[Callable[[WorkerConfig], Any], int, int, int]] = {
            "images, 1 worker": (_make(pictures, Decoded(), 32), 1, 60, 32),
            "sleep, 4 workers": (_make(texts, Sleeping(0.01), 8), 4, 200, 8),
            "sleep, 8 workers": (_make(texts, Sleeping(0.01), 8), 8, 400, 8),
            "sleep 0.2 s, 32 workers": (_make(texts, Sleeping(0.2), 8), 32, 640, 8),
            "sleep 0.2 s, 64 workers": (_make(texts, Sleeping(0.2), 8), 64, 1280, 8),
            "slow, as before": (_make(texts, Sleeping(0.0, 1.0), 8), 4, 500, 8),
            "slow, 4 workers": (_make(texts, Sleeping(0.0, 1.0), 8), 4, 1000, 8),
        }
        for case, (make, workers, batches, size) in cases.items():
            if not case.startswith(asked.only):
                continue
            first = 200 if case.startswith("slow") else 4 * workers
            worker_pool._MOST_AHEAD = 0 if case.endswith("before") else 16
            rows = []
            found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
            for _ in range(asked.runs):
                for kind in kinds:
                    found[kind].append(_rate(make, kind, workers, batches, first))
            for kind, pairs in found.items():
                rates, used = ([pair[place] for pair in pairs] for place in (0, 1))
                rows.append([case, kind, spread([size * rate for rate in rates], 0), spread(used, 2)])
            print(table(["case", "workers", "samples/s", "trainer ms/batch"], rows), flush=True)


def _make(path: Path, encoder: TaskEncoder, size: int) -> Callable[[WorkerConfig], Any]:
    return lambda config: get_train_dataset(path, worker_config=config, batch_size=size, task_encoder=encoder)


if __name__ == "__main__":
    main()
