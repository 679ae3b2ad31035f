"""What a record on S3 costs: a full permutation of 20,000 records of about 7 kB, one request each, 5 ms an answer.

moto's S3 lists, ``range_server.py`` answers the ranges; both have the same cores as the workers. Compared are our own
requests, those of ``s3fs``, and the store of ``slow_store.py``, which waits in the workers and needs no server.

How to read it: samples per second (higher is better), and microseconds of a processor for each sample, of the trainer
and of its workers. Where cores are shared, the second says more.

    python tools/bench/s3_records.py [--small]
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import slow_store  # noqa: F401 (registers far://)
from common import fresh_process, machine, spread, table
from locality import BATCH, make_data
from remote import WORDS, s3

FIRST = 32  # batches before the measurement
CASES = [(how, workers) for how in ("own requests", "s3fs", "slow_store") for workers in (0, 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="5,000 records, once")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(**json.loads(arguments.measure))))
        return
    runs, samples = (1, 5_000) if arguments.small else (arguments.runs, 20_000)
    found: dict[tuple[str, int], list[list[float]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as folder, s3(delay=0.0) as upstream:
        os.environ.update(WORDS, AWS_ENDPOINT_URL=upstream, ENERGON_LITE_CACHE=f"{folder}/cache")
        make_data(Path(folder) / "one/data", samples)
        import s3fs

        fs = s3fs.S3FileSystem()
        fs.mkdir("one")
        fs.put(f"{folder}/one/data", "one/", recursive=True)
        with server(folder, int(upstream.rpartition(":")[2])) as endpoint:
            os.environ["AWS_ENDPOINT_URL"] = endpoint
            for how, workers in CASES * runs:
                path = f"far://{folder}/one/data" if how == "slow_store" else "s3://one/data"
                count = samples // (8 if how == "s3fs" else 1)
                what = {"path": path, "is_direct": how != "s3fs", "workers": workers, "count": count}
                found[how, workers].append(fresh_process(__file__, "--measure", json.dumps(what)))
    rows = [
        [how, workers, *(spread(list(values), 0) for values in zip(*measured, strict=True))]
        for (how, workers), measured in found.items()
    ]
    print(machine())
    print(table(["requests", "workers", "samples/s", "trainer, µs", "workers, µs"], rows))


@contextmanager
def server(folder: str, upstream: int) -> Iterator[str]:
    """The endpoint of the server of ranges; ports are those that moto's proxy does not use."""
    port = upstream + 1
    script = str(Path(__file__).parent / "range_server.py")
    process = subprocess.Popen([sys.executable, script, str(port), folder, str(upstream)], stdout=subprocess.DEVNULL)
    try:
        time.sleep(1.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def measure(path: str, is_direct: bool, workers: int, count: int) -> list[float]:
    """Samples per second; microseconds for each, of this process, and of its workers."""
    import energon_lite as lib
    from energon_lite.extras.remote import direct_ranges

    if not is_direct:
        direct_ranges._NOTHING.clear()
    encoder = lib.DefaultTaskEncoder()
    encoder.decoder = None
    dataset = lib.get_train_dataset(
        path,
        batch_size=BATCH,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        worker_config=lib.WorkerConfig(rank=0, world_size=1, num_workers=workers),
        task_encoder=encoder,
    )
    with lib.get_savable_loader(dataset, start_method="fork") as loader:
        batches = iter(loader)
        for _ in itertools.islice(batches, FIRST):
            pass
        began, own, theirs = time.perf_counter(), time.process_time(), seconds_of_children()
        for _ in itertools.islice(batches, count // BATCH):
            pass
        done = count // BATCH * BATCH
        own, theirs = time.process_time() - own, seconds_of_children() - theirs
        return [done / (time.perf_counter() - began), 1e6 * own / done, 1e6 * theirs / done]


def seconds_of_children() -> float:
    """Seconds of a processor that the workers have used."""
    ticks = 0
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
