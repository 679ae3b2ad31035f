"""Samples per second: energon_lite beside the loaders that people would use instead, over the same samples.

Two data sets are made in a temporary folder: JPEG images of 64 to 256 pixels with captions (about 7 kB), and arrays of
tokens (npy, lengths lognormal, 16 to 2,048). mosaicml-streaming and litdata get them in their own formats. Each figure
is a fresh process that shuffles, makes batches of 32 and counts for some seconds; the libraries take turns. "raw" hands
out bytes, "decoded" calls the same decoder in all of them (:mod:`loader_libraries`), "user" is raw with an
``encode_sample`` of the user's, "pure" with one that says it draws no random numbers, "fast" decodes with simplejpeg.
"batch" is raw with a ``batch`` of the user's, "both" with an ``encode_sample`` and a ``batch``, "both-pure" the same
where ``encode_sample`` says that it draws no random numbers (so that, as in LitData, nothing is seeded for it),
"decoded-batch" decodes in ``batch`` (and "decoded" in ``encode_sample``); LitData does the same work in its own loop.

On a busy machine compare samples per second of processor time, of all processes of a library together.

"bound" is what one core can do: raw, a loop over slices of mapped shards in a random order; decoded, decoding and
collating samples that are in memory. PSS is the memory of all processes, shared pages divided, when counting ends.

The peers bring another torch, so they live in an environment of their own:

    python -m venv peers
    peers/bin/pip install torch webdataset torchdata litdata mosaicml-streaming simplejpeg pillow numpy
    python tools/bench/loader.py --peers peers/bin/python [--runs 5] [--seconds 3] [--only image-raw] [--small]
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, spread, table, write_shards

CASES = (
    *("image-raw", "image-user", "image-pure", "image-batch", "image-both", "image-both-pure"),
    *("image-decoded", "image-decoded-batch", "image-fast"),
    *("tokens-raw", "tokens-batch", "tokens-both", "tokens-both-pure", "tokens-decoded", "tokens-decoded-batch"),
)
OURS = ("bound", "energon_lite", "megatron_energon")
PEERS = ("streaming", "litdata", "torchdata")
#: Seconds for one figure, or for making the peers' formats.
LIMIT = 300
#: What only some of them do.
ONLY = {
    **dict.fromkeys(
        (f"{data}-{form}" for data in ("image", "tokens") for form in ("batch", "both", "both-pure", "decoded-batch")),
        ("energon_lite", "litdata"),
    ),
    "image-user": ("energon_lite", "megatron_energon"),
    "image-pure": ("energon_lite", "megatron_energon"),
    "image-fast": ("energon_lite",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--peers", help="an interpreter that has the other libraries")
    parser.add_argument("--library", choices=[*OURS[1:], *PEERS], action="append", help="default: all")
    parser.add_argument("--workers", type=int, action="append", help="default: 0 and 2")
    parser.add_argument("--small", action="store_true", help="a tenth of the samples")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder), 10 if arguments.small else 1)
        if arguments.peers:
            ask(arguments.peers, {"folder": folder, "convert": True})
        print(machine())
        for case in arguments.only or CASES:
            rows = compare(case, folder, arguments)
            heads = ["library", "workers", "samples/s", "of the bound", "per CPU second", "longest step ms", "PSS MiB"]
            print(f"\n{case}\n{table(heads, rows)}", flush=True)


def compare(case: str, folder: str, arguments: argparse.Namespace) -> list[list[object]]:
    """A row for each library and number of workers."""
    peers, chosen = arguments.peers, arguments.library or (*OURS[1:], *PEERS)
    libraries = [name for name in ONLY.get(case, (*OURS, *PEERS)) if name in chosen and (peers or name not in PEERS)]
    settings = [("bound", 0), *itertools.product(libraries, arguments.workers or (0, 2))]
    found: dict[tuple[str, int], list[dict[str, float]]] = {setting: [] for setting in settings}
    for _ in range(arguments.runs):
        for name, workers in settings:
            what = {"library": name, "folder": folder, "case": case, "workers": workers, "seconds": arguments.seconds}
            interpreter = peers if peers and name in PEERS else sys.executable
            found[name, workers].append(ask(interpreter, what))
    bound = statistics.median(run["rate"] for run in found["bound", 0])
    rows: list[list[object]] = []
    for (name, workers), measured in found.items():
        rates = [run["rate"] for run in measured]
        share = f"{statistics.median(rates) / bound:.2f}"
        others = [spread([run[what] for run in measured], 0) for what in ("per_cpu", "longest", "pss")]
        rows.append([name, workers, spread(rates, 0), share, *others])
    return rows


def ask(interpreter: str, request: dict[str, Any]) -> Any:
    """What a fresh process measured."""
    script = str(Path(__file__).with_name("loader_libraries.py"))
    command, environment = [interpreter, script, json.dumps(request)], os.environ | {"OMP_NUM_THREADS": "1"}
    # Workers of some libraries outlive the process that started them. So nothing waits for the end of its output, and
    # what is left of its session is ended.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True)
        try:
            code: int | str = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = f"it hung for {LIMIT} s"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out.seek(0)
        err.seek(0)
        if code:
            raise SystemExit(f"{' '.join(command)} failed ({code}):\n{err.read()}")
        return json.loads(out.read().strip().splitlines()[-1])


def make_data(folder: Path, divisor: int) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)

    def images() -> Iterator[dict[str, bytes]]:
        for number in range(20_000 // divisor):
            stream, side = io.BytesIO(), int(rng.integers(64, 257))
            coarse = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
            yield {"jpg": stream.getvalue(), "txt": f"picture number {number}".encode()}

    def tokens() -> Iterator[dict[str, bytes]]:
        for length in np.clip(rng.lognormal(5.3, 0.9, 200_000 // divisor), 16, 2048).astype(int):
            stream = io.BytesIO()
            np.save(stream, rng.integers(0, 32_000, length, dtype=np.int32))
            yield {"npy": stream.getvalue()}

    write_shards(folder / "image", images(), 1000, "CaptioningSample", {"image": "jpg", "caption": "txt"})
    write_shards(folder / "tokens", tokens(), 10_000, "TextSample", {"text": "npy"})
    for shard in folder.glob("*/*.tar"):
        with tarfile.open(shard) as tar:
            spans = [(member.offset_data, member.offset_data + member.size) for member in tar]
        parts = 2 if shard.parent.name == "image" else 1
        places = [list(itertools.chain(*spans[at : at + parts])) for at in range(0, len(spans), parts)]
        shard.with_suffix(".places").write_text(json.dumps(places))


if __name__ == "__main__":
    sys.exit(main())
