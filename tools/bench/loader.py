"""Samples per second: energon_lite beside Megatron-Energon, on the same prepared folders.

Two data sets are made in a temporary folder: small JPEG images with captions, and arrays of tokens (npy, lengths
lognormal). Each figure is a fresh process that shuffles, batches by 32 and counts for a few seconds; the two libraries
take turns. "raw" hands out the bytes, "decoded" decodes in the library's own way and collates.

How to read it: the ratio is of the medians, above 1 means that energon_lite is faster. Differences below 10 % mean
nothing.

    python tools/bench/loader.py [--runs 3] [--seconds 3] [--only images-raw]
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import fresh_process, machine, spread, table, write_shards

CASES = ("images-raw", "images-decoded", "tokens-raw", "tokens-decoded")
BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(**json.loads(arguments.measure))))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder))
        rows = [
            compare(folder, case, workers, arguments.runs, arguments.seconds)
            for case in arguments.only or CASES
            for workers in (0, 2)
        ]
    print(machine())
    print(table(["case", "workers", "energon_lite, samples/s", "megatron-energon, samples/s", "ratio"], rows))


def compare(folder: str, case: str, workers: int, runs: int, seconds: float) -> list[object]:
    rates: dict[str, list[float]] = {"energon_lite": [], "megatron.energon": []}
    for _ in range(runs):
        for library, found in rates.items():
            what = {"library": library, "folder": folder, "case": case, "workers": workers, "seconds": seconds}
            found.append(fresh_process(__file__, "--measure", json.dumps(what)))
    ours, theirs = rates.values()
    ratio = statistics.median(ours) / statistics.median(theirs)
    return [case, workers, spread(ours, 0), spread(theirs, 0), f"{ratio:.1f}"]


def measure(library: str, folder: str, case: str, workers: int, seconds: float) -> float:
    """Samples per second after the first batches, in this process."""
    data, _, form = case.partition("-")
    if library == "energon_lite":
        import energon_lite as lib

        encoder: Any = lib.DefaultTaskEncoder()
    else:
        from megatron import energon as lib  # type: ignore[no-redef]

        encoder = lib.DefaultTaskEncoder()
    if form == "raw":
        encoder.decoder = None
    dataset = lib.get_train_dataset(
        str(Path(folder) / data),
        batch_size=BATCH,
        shuffle_buffer_size=1000,
        max_samples_per_sequence=100,
        worker_config=lib.WorkerConfig(rank=0, world_size=1, num_workers=workers),
        task_encoder=encoder,
    )
    batches = iter(lib.get_savable_loader(dataset))
    for _ in range(5):
        next(batches)
    done, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        next(batches)
        done += BATCH
    return done / elapsed


def make_data(folder: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)

    def images() -> Iterator[dict[str, bytes]]:
        for number in range(4000):
            stream = io.BytesIO()
            coarse = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((128, 128), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
            yield {"jpg": stream.getvalue(), "txt": f"picture number {number}".encode()}

    def tokens() -> Iterator[dict[str, bytes]]:
        for length in np.clip(rng.lognormal(5.3, 0.9, 40_000), 16, 2048).astype(int):
            stream = io.BytesIO()
            np.save(stream, rng.integers(0, 32_000, length, dtype=np.int32))
            yield {"npy": stream.getvalue()}

    write_shards(folder / "images", images(), 500, "CaptioningSample", {"image": "jpg", "caption": "txt"})
    write_shards(folder / "tokens", tokens(), 5000, "TextSample", {"text": "npy"})


if __name__ == "__main__":
    sys.exit(main())
