"""What a store far away costs: against local files, with hanging, and with failing requests.

* ``s3``: a blend of two buckets on moto's S3 server, prepared as Megatron-Energon does (no packed index), behind a
  proxy that takes 20 ms for each request, in runs of 100 and windows of 1,000; against the same files on local disk.
  Images of 256 x 256 are decoded, in two workers. The servers have the same cores as the workers.
* ``hanging``: the time of a batch where 1 % of the requests take a second more, in a loop that works 30 ms on each;
  with and without second requests. Full permutation, 20 ms a request.
* ``failing``: samples that are lost where 5 % of the requests fail, and the rate.
* ``--clients``, alone: the cost of a request, 64 at the same time, 5 ms an answer (``range_server.py``), of the
  library's client, of obstore where it is installed (without and with the version of each answer), and of s3fs.

How to read it: samples per second (higher is better), alternating; milliseconds that the loop waits for a batch.

    python tools/bench/remote.py [--small] [--clients]
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from common import fresh_process, machine, spread, table, write_shards
from slow_store import STORE

Read = Callable[[int, int], Awaitable[bytes | memoryview]]
BATCH, STEP = 32, 30e-3
WORDS = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_DEFAULT_REGION": "us-east-1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="few samples, once")
    parser.add_argument("--clients", action="store_true", help="compare clients of ranges instead")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        what = json.loads(arguments.measure)
        print(json.dumps(globals()[what.pop("part")](**what)), flush=True)
        os._exit(0)  # a process that has used obstore in an event loop may abort at its regular end
    runs, samples = (1, 1_000) if arguments.small else (arguments.runs, 6_000)
    print(machine())
    if arguments.clients:
        compare_clients(1 if arguments.small else max(5, arguments.runs))
        return
    with tempfile.TemporaryDirectory() as folder:
        against_local(Path(folder), samples, runs)
        make_records(Path(folder) / "records", 4 * samples)
        behaviour(f"far://{folder}/records", 4 * samples, runs)


def against_local(folder: Path, samples: int, runs: int) -> None:
    for bucket in ("one", "two"):
        make_images(folder / bucket / "data", samples // 2, seed=len(bucket))
        (folder / bucket / "data/.nv-meta/energon_lite.idx").unlink()
    with s3(delay=0.02) as endpoint:
        os.environ.update(WORDS, AWS_ENDPOINT_URL=endpoint, ENERGON_LITE_CACHE=str(folder / "cache"))
        import s3fs

        fs = s3fs.S3FileSystem()
        for bucket in ("one", "two"):
            fs.mkdir(bucket)
            fs.put(f"{folder}/{bucket}/data", f"{bucket}/", recursive=True)
        found: dict[str, list[float]] = {"local": [], "s3": []}
        for _ in range(runs):
            for place, paths in (("local", f"{folder}/"), ("s3", "s3://")):
                what = {"part": "blend", "paths": [f"{paths}{bucket}/data" for bucket in ("one", "two")]}
                found[place].append(fresh_process(__file__, "--measure", json.dumps(what | {"samples": samples})))
    ratios = [far / near for far, near in zip(found["s3"], found["local"], strict=True)]
    rows = [[place, spread(rates, 0)] for place, rates in found.items()]
    print(table(["two buckets", "samples/s"], [*rows, ["s3 / local", spread(ratios)]]), end="\n\n")


def compare_clients(runs: int) -> None:
    cases = [(client, size) for size in (7_000, 1 << 20) for client in CLIENTS]
    found: dict[tuple[str, int], list[list[float]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "bucket").mkdir()
        (Path(folder) / "bucket/a.tar").write_bytes(np.random.default_rng(0).bytes(64 << 20))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "range_server.py"), str(port), folder, "1"],
            stdout=subprocess.DEVNULL,
        )
        os.environ.update(WORDS, AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.1)
            for client, size in cases * runs:
                what = {"part": "ranges", "client": client, "size": size, "count": 8_000 if size < 1 << 20 else 400}
                found[client, size].append(fresh_process(__file__, "--measure", json.dumps(what)))
        finally:
            server.terminate()
            server.wait()
    rows = [
        [size, client, *(spread(list(values), 0) for values in zip(*measured, strict=True))]
        for (client, size), measured in found.items()
    ]
    print(table(["bytes", "client", "ranges/s", "processor of the client, µs"], rows))


def ranges(client: str, size: int, count: int) -> list[float]:
    """Ranges per second, and microseconds of a processor for each."""
    import fsspec.asyn

    loop = fsspec.asyn.get_loop()
    places = iter([offset % ((64 << 20) - size) for offset in range(0, 7919 * 997 * count, 7919 * 997)])
    read = CLIENTS[client]()

    async def one_after_the_other() -> None:
        for place in places:
            assert len(await read(place, size)) == size

    async def together() -> None:
        await asyncio.gather(*[one_after_the_other() for _ in range(64)])

    fsspec.asyn.sync(loop, read, 0, size)
    began, own = time.perf_counter(), time.process_time()
    fsspec.asyn.sync(loop, together)
    return [count / (time.perf_counter() - began), 1e6 * (time.process_time() - own) / count]


def own_client() -> Read:
    from energon_lite.extras.remote.remote_files import read_range_in_loop

    return lambda offset, size: read_range_in_loop("s3://bucket/a.tar", offset, size)


def s3fs_client() -> Read:
    import s3fs

    fs = s3fs.S3FileSystem()
    return lambda offset, size: fs._cat_file("bucket/a.tar", start=offset, end=offset + size)


def obstore_client(is_checked: bool) -> Read:
    import obstore

    options: Any = {"allow_http": True}
    store = obstore.store.S3Store("bucket", endpoint=os.environ["AWS_ENDPOINT_URL"], client_options=options)

    async def checked(offset: int, size: int) -> memoryview:
        answer = await obstore.get_async(store, "a.tar", options={"range": (offset, offset + size)})
        assert answer.meta["e_tag"]
        return memoryview(await answer.bytes_async())

    async def read(offset: int, size: int) -> memoryview:
        return memoryview(await obstore.get_range_async(store, "a.tar", start=offset, length=size))

    return checked if is_checked else read


CLIENTS: dict[str, Callable[[], Read]] = {"own": own_client, "s3fs": s3fs_client}
if find_spec("obstore"):
    CLIENTS |= {"obstore": partial(obstore_client, False), "obstore, versions": partial(obstore_client, True)}


def behaviour(path: str, samples: int, runs: int) -> None:
    rows = []
    for name, how, hedge in (
        ("as ever", {}, True),
        ("1 % hang", {"hanging": 0.01}, True),
        ("1 % hang, no second requests", {"hanging": 0.01}, False),
        ("5 % fail", {"failing": 0.05}, True),
    ):
        what = {"part": "waits", "path": path, "samples": samples, "how": {"delay": 0.02, **how}, "hedge": hedge}
        found = [fresh_process(__file__, "--measure", json.dumps(what)) for _ in range(runs)]
        middle, high, most, lost, rate = zip(*found, strict=True)
        rows.append([name, *(spread(one, 1) for one in (middle, high, most)), max(lost), spread(rate, 0)])
    head = ["store", "median batch, ms", "P99, ms", "longest, ms", "samples lost", "samples/s, no work"]
    print(table(head, rows))


def blend(paths: list[str], samples: int) -> float:
    """Samples per second."""
    import energon_lite as lib

    document = {"splits": {"train": {"blend": [{"path": path, "weight": 1.0} for path in paths]}}}
    document |= {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    dataset = lib.get_train_dataset(
        document,
        batch_size=BATCH,
        shuffle_buffer_size=1000,
        max_samples_per_sequence=100,
        worker_config=lib.WorkerConfig(rank=0, world_size=1, num_workers=2),
    )
    with lib.get_savable_loader(dataset, start_method="fork") as loader:
        batches = iter(loader)
        next(batches)
        start = time.perf_counter()
        for _ in itertools.islice(batches, samples // BATCH - 1):
            pass
        return (samples // BATCH - 1) * BATCH / (time.perf_counter() - start)


def waits(path: str, samples: int, how: dict[str, float], hedge: bool) -> list[float]:
    """Milliseconds of a batch, median, P99 and most; samples lost; samples per second where nothing else is done."""
    import energon_lite as lib

    STORE.set(**how)
    encoder = lib.DefaultTaskEncoder()
    encoder.decoder = None
    dataset = lib.get_train_dataset(
        path,
        batch_size=BATCH,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        virtual_epoch_length=samples // BATCH,
        worker_config=lib.WorkerConfig(rank=0, world_size=1, num_workers=2),
        task_encoder=encoder,
        reading=lib.Reading(read_ahead=lib.ReadAhead(hedge=hedge)),
    )
    times, keys = [], []
    with lib.get_savable_loader(dataset, start_method="fork") as loader:
        batches = iter(loader)
        keys += next(batches).__key__
        for _ in range(min(400, samples // BATCH // 2)):
            time.sleep(STEP)
            start = time.perf_counter()
            keys += next(batches).__key__
            times.append(1e3 * (time.perf_counter() - start + STEP))
        start, before = time.perf_counter(), len(keys)
        for batch in batches:
            keys += batch.__key__
        rate = (len(keys) - before) / (time.perf_counter() - start)
    lost = samples // BATCH * BATCH - len(set(keys))
    return [statistics.median(times), float(np.percentile(times, 99)), max(times), lost, rate]


@contextmanager
def s3(delay: float) -> Iterator[str]:
    """The endpoint of moto's server behind the proxy."""
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    moto = "import time; from moto.server import ThreadedMotoServer as S;"
    moto += f"S('127.0.0.1', {ports[0]}, verbose=False).start(); time.sleep(3600)"
    proxy = str(Path(__file__).parent / "store_proxy.py")
    commands = [["-c", moto], [proxy, str(ports[1]), str(ports[0]), "--delay", str(delay), "--keep"]]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    servers = [subprocess.Popen([sys.executable, *command], **quiet) for command in commands]  # type: ignore[call-overload]
    try:
        for port in ports:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.1)
        yield f"http://127.0.0.1:{ports[1]}"
    finally:
        for server in servers:
            server.kill()


def make_images(folder: Path, samples: int, seed: int) -> None:
    from PIL import Image

    rng = np.random.default_rng(seed)
    pictures = []
    for _ in range(64):
        small = Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        small.resize((256, 256)).save(buffer, "jpeg", quality=90)
        pictures.append(buffer.getvalue())
    parts = ({"jpg": pictures[number % 64], "txt": f"{seed} {number}".encode()} for number in range(samples))
    write_shards(folder, parts, 500, "CaptioningSample", {"image": "jpg", "caption": "txt"})


def make_records(folder: Path, samples: int) -> Any:
    rng = np.random.default_rng(0)
    sizes: Any = np.clip(rng.lognormal(8.7, 0.55, samples), 1_600, 24_000).astype(int)
    parts = ({"jpg": rng.bytes(int(size)), "txt": b"a caption"} for size in sizes)
    return write_shards(folder, parts, 1000, "CaptioningSample", {"image": "jpg", "caption": "txt"})


if __name__ == "__main__":
    main()
