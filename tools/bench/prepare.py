"""Preparing a data set: `energon-lite prepare` beside `energon prepare`, on the same shards.

Three data sets are made in a temporary folder: images with a JSON each, short texts, and samples of three small files
as `webdataset.TarWriter` writes them, with a pax header before each file. Each figure is one call of the command line
in a new process, start of the interpreter included, on shards that nobody has prepared; both libraries get two worker
processes and take turns. "all files" writes everything that Energon writes and our own index; "own index" is
`--no-sqlite`.

How to read it: ratios are of medians, above 1 means that energon_lite is faster. The marks are 5 for all files and 15
for our own index alone, in time on a machine that does nothing else. "cpu s" is processor time, of workers too, which
other load disturbs less; it does not tell what two processes save.

    python tools/bench/prepare.py [--runs 3] [--samples 50000 | --full] [--only text]
"""

from __future__ import annotations

import argparse
import io
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from common import machine, spread, table

ROOT = Path(__file__).parents[2]
OURS = [sys.executable, "-m", "energon_lite.cli.main", "prepare"]
THEIRS = [sys.executable, "-c", "from megatron.energon.cli.main import main; main()", "prepare"]
OPTIONS = ["--non-interactive", "--split-ratio", "8,1,1", "--sample-type", "CrudeWebdataset", "--num-workers", "2"]
KINDS = ("image", "text", "webdataset")
#: Command and options of what is compared; the last is what the others are compared with.
COMMANDS = {"all files": [*OURS], "own index": [*OURS, "--no-sqlite"], "megatron-energon": [*THEIRS]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--full", action="store_true", help="200,000 samples")
    parser.add_argument("--only", choices=KINDS, action="append")
    arguments = parser.parse_args()
    samples = 200_000 if arguments.full else arguments.samples
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as name:
        for kind in arguments.only or KINDS:
            folder = Path(name) / kind
            make_shards(folder, samples, kind)
            rows += compare(folder, kind, samples, arguments.runs)
            shutil.rmtree(folder)
    print(machine())
    print(table(["samples", "what", "s", "samples/s", "ratio", "cpu s", "cpu ratio"], rows))


def compare(folder: Path, kind: str, samples: int, runs: int) -> list[list[str]]:
    times: dict[str, list[float]] = {what: [] for what in COMMANDS}
    processor: dict[str, list[float]] = {what: [] for what in COMMANDS}
    for _ in range(runs):
        for what, command in COMMANDS.items():
            clean(folder)
            elapsed, used = seconds([*command, str(folder), *OPTIONS])
            times[what].append(elapsed)
            processor[what].append(used)
    whole = {what: statistics.median(found) for what, found in times.items()}
    cpu = {what: statistics.median(found) for what, found in processor.items()}
    last = list(COMMANDS)[-1]
    return [
        [
            f"{samples} {kind}",
            what,
            spread(times[what]),
            f"{samples / whole[what]:.0f}",
            f"{whole[last] / whole[what]:.1f}",
            f"{cpu[what]:.2f}",
            f"{cpu[last] / cpu[what]:.1f}",
        ]
        for what in COMMANDS
    ]


def seconds(command: list[str]) -> tuple[float, float]:
    """Time, and processor time of the command and its workers."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    elapsed = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def clean(folder: Path) -> None:
    """Remove all that a preparation writes."""
    shutil.rmtree(folder / ".nv-meta", ignore_errors=True)
    for path in folder.glob("*.idx"):
        path.unlink()


def make_shards(folder: Path, samples: int, kind: str, shards: int = 20) -> None:
    """Tar shards of images of about 7 kB with a JSON each, of texts of about 1.3 kB, or of three small files."""
    folder.mkdir(parents=True)
    rng = random.Random(0)
    for shard in range(shards):
        tar_format = tarfile.PAX_FORMAT if kind == "webdataset" else tarfile.USTAR_FORMAT
        with tarfile.open(folder / f"{shard:03d}.tar", "w", format=tar_format) as tar:
            for number in range(samples * shard // shards, samples * (shard + 1) // shards):
                if kind == "image":
                    parts = {"jpg": bytes(rng.randrange(5_000, 9_000)), "json": b'{"number": %d}' % number}
                elif kind == "text":
                    parts = {"txt": b"x" * rng.randrange(200, 2_400)}
                else:
                    parts = {"jpg": bytes(rng.randrange(500, 2_500)), "txt": b"text", "json": b"{}"}
                for name, data in parts.items():
                    info = tarfile.TarInfo(f"{number:08d}.{name}")
                    info.size = len(data)
                    info.mtime = 1_700_000_000.25 if kind == "webdataset" else 0
                    tar.addfile(info, io.BytesIO(data))


if __name__ == "__main__":
    main()
