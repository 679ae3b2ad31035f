"""Time of runs with a store of samples, beside runs that decode: JPEG pictures, resized by a hook of the user's.

    python tools/bench/sample_store.py --samples 400 --runs 3

It prints samples a second of a run without a store, of the run that fills it, and of the next run, with medians of
several runs and the worst step.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import statistics
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset, stateless
from energon_lite.extras.remote import SampleStore

DATASET = """\
sample_type: {__module__: megatron.energon, __class__: CaptioningSample}
field_map: {image: jpg, caption: txt}
"""


def write_data(folder: Path, samples: int) -> None:
    """Write JPEG pictures of 1024 x 768, smooth with some noise, as a prepared folder."""
    random = np.random.default_rng(0)
    (folder / ".nv-meta").mkdir(parents=True)
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number in range(samples):
            coarse = Image.fromarray(random.integers(0, 255, (12, 16, 3), dtype=np.uint8)).resize((1024, 768))
            pixels = np.asarray(coarse, dtype=np.int16) + random.integers(-6, 7, (768, 1024, 1), dtype=np.int16)
            file = io.BytesIO()
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=88)
            for name, data in (("jpg", file.getvalue()), ("txt", b"a picture")):
                info = tarfile.TarInfo(f"{number:06d}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    meta = folder / ".nv-meta"
    (meta / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": {"a.tar": samples}}))
    (meta / "split.yaml").write_text("split_parts: {train: [a.tar]}\nexclude: []\n")
    (meta / "dataset.yaml").write_text(DATASET)


class Pictures(TaskEncoder):
    """Decodes and resizes, as users write it."""

    decoder = None

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> Any:
        picture = Image.open(io.BytesIO(sample.image)).convert("RGB").resize((336, 336), Image.Resampling.BICUBIC)
        return {"__key__": sample.__key__, "image": torch.from_numpy(np.array(picture)).permute(2, 0, 1)}


def run(data: Path, samples: int, workers: int, store: SampleStore | None) -> tuple[float, float]:
    """Return samples a second of an epoch without its first batch, and the longest step in seconds."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    dataset = get_train_dataset(str(data), worker_config=config, batch_size=8, task_encoder=Pictures())
    with get_savable_loader(dataset, sample_store=store) as loader:
        batches = iter(loader)
        next(batches)
        steps = samples // 8 - 1
        began = last = time.perf_counter()
        worst = 0.0
        for _ in range(steps):
            next(batches)
            now = time.perf_counter()
            worst, last = max(worst, now - last), now
        return 8 * steps / (last - began), worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    logging.getLogger("energon_lite").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_data(data, given.samples)
        for workers in (0, 2):
            found: dict[str, list[tuple[float, float]]] = {"decoded": [], "decoded and stored": [], "stored": []}
            for number in range(given.runs):
                store = SampleStore(f"{folder}/store{workers}{number}", max_bytes=100 << 30)
                for name, of in (("decoded", None), ("decoded and stored", store), ("stored", store)):
                    found[name].append(run(data, given.samples, workers, of))
            usual = statistics.median(speed for speed, _ in found["decoded"])
            for name, runs in found.items():
                speed = statistics.median(speed for speed, _ in runs)
                worst = statistics.median(worst for _, worst in runs)
                print(
                    f"{workers} workers, {name}: {speed:.0f}/s, {speed / usual:.2f}x, worst step {worst * 1e3:.0f} ms"
                )


if __name__ == "__main__":
    main()
