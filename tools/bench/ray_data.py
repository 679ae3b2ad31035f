"""Ray Data's ``streaming_split`` and the service of tf.data beside workers of this library, in one run: the same
pictures, on the same cores.

JPEGs of 512 x 384 are read from tar shards, decoded and resized to 224 x 224 by the same function, 32 in a batch, by
two workers of each kind in turn. Reported are the time to the first batch, samples a second after it, and the cost of
a worker that is killed in the middle: the longest wait for a batch, and samples that are missing or come twice.

The service of tf.data has the pictures in TFRecords, decodes and resizes them by TensorFlow with one thread in each of
two worker processes, and deals its shards dynamically.

    pip install 'ray[data]' tensorflow-cpu
    python tools/bench/ray_data.py --runs 3
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
import torch
from common import machine, spread, table
from remote_workers import _pictures, _workers

from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.storage import SampleDecoder

PICTURES, EPOCHS, BATCH, WORKERS = 400, 8, 32, 2
KINDS = ("local", "tcp", "ray", "streaming_split", "tf.data")


def resized(image: torch.Tensor) -> torch.Tensor:
    """A picture of one size."""
    from torch.nn.functional import interpolate

    image = interpolate(image[None], (224, 224), mode="bilinear", antialias=True)[0]
    return (image * 255).byte()


class Resized(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        sample.image = resized(sample.image)
        return sample


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """A row of Ray Data."""
    torch.set_num_threads(1)
    image = SampleDecoder().decode("jpg", row["jpg"])
    return {"key": row["__key__"], "image": resized(torch.as_tensor(image)).numpy()}


def _of_ray_data(folder: Path) -> Iterator[list[str]]:
    """Keys of the batches of Ray Data. It has no epochs of a source, so the shards are listed several times."""
    shards = sorted(map(str, folder.glob("*.tar"))) * EPOCHS
    data = ray.data.read_webdataset(shards, decoder=None).map(_row)
    (split,) = data.streaming_split(1)
    for batch in split.iter_batches(batch_size=BATCH):
        assert np.asarray(batch["image"]).shape[1:] == (3, 224, 224)
        yield list(batch["key"])


def _of_this(folder: Path, kind: str) -> Iterator[list[str]]:
    """Keys of the batches of a loader."""

    def make(config: WorkerConfig) -> Any:
        return get_train_dataset(folder, worker_config=config, batch_size=BATCH, task_encoder=Resized())

    with _workers(kind, make, WORKERS) as config, get_savable_loader(make(config)) as loader:
        for _, batch in zip(range(PICTURES * EPOCHS // BATCH), loader, strict=False):
            yield batch.__key__


TF_WORKER = """
import sys, tensorflow as tf
service = tf.data.experimental.service
config = service.WorkerConfig(sys.argv[1], heartbeat_interval_ms=1000)
service.WorkerServer(config).join()
"""


def _of_tf_data(folder: Path) -> Iterator[list[str]]:
    """Keys of the batches of tf.data, by its service with two worker processes."""
    import tensorflow as tf

    service = tf.data.experimental.service
    config = service.DispatcherConfig(job_gc_timeout_ms=1000, worker_timeout_ms=3000)
    dispatcher = service.DispatchServer(config)
    target = dispatcher.target.split("://")[1]
    workers = [subprocess.Popen([sys.executable, "-c", TF_WORKER, target, "tf.data worker"]) for _ in range(WORKERS)]
    form = {name: tf.io.FixedLenFeature([], tf.string) for name in ("key", "jpg")}

    def row(record: Any) -> Any:
        parts = tf.io.parse_single_example(record, form)
        image = tf.image.resize(tf.io.decode_jpeg(parts["jpg"], channels=3), (224, 224), antialias=True)
        return parts["key"], tf.transpose(tf.cast(image, tf.uint8), (2, 0, 1))

    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    shards = sorted(map(str, folder.glob("*.tfrecord"))) * EPOCHS
    data = tf.data.Dataset.from_tensor_slices(shards).flat_map(tf.data.TFRecordDataset).map(row).batch(BATCH)
    data = data.with_options(options)
    policy = service.ShardingPolicy.DYNAMIC
    try:
        for keys, images in data.apply(service.distribute(policy, dispatcher.target)):
            assert images.shape[1:] == (3, 224, 224)
            yield [key.decode() for key in keys.numpy()]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _write_records(folder: Path) -> None:
    """Write the pictures of the shards as TFRecords, if TensorFlow is installed."""
    import tensorflow as tf

    def feature(value: bytes) -> Any:
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))

    for shard in folder.glob("*.tar"):
        with tarfile.open(shard) as tar, tf.io.TFRecordWriter(str(shard.with_suffix(".tfrecord"))) as writer:
            for member in tar:
                if member.name.endswith(".jpg"):
                    jpg = tar.extractfile(member)
                    assert jpg is not None
                    parts = {"key": feature(member.name.removesuffix(".jpg").encode()), "jpg": feature(jpg.read())}
                    writer.write(tf.train.Example(features=tf.train.Features(feature=parts)).SerializeToString())


def _below(pid: int) -> Iterator[int]:
    """Processes that a process has started, and those that they have started."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended
            for child in map(int, children.read_text().split()):
                yield child
                yield from _below(child)


def _worker_processes(name: str) -> list[int]:
    """Processes below this one whose title contains ``name``, the busiest first."""
    found = []
    for pid in _below(os.getpid()):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            ticks = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except (OSError, UnicodeDecodeError):
            continue
        if name in title:
            found.append((int(ticks[11]) + int(ticks[12]), pid))
    return [pid for _, pid in sorted(found, reverse=True)]


#: Text in the titles of the workers of each kind; those of this library are forked, and have the title of this process.
TITLES = {
    "local": Path(__file__).name,
    "tcp": Path(__file__).name,
    "ray": "ray::Worker",
    "streaming_split": "Map(",
    "tf.data": "tf.data worker",
}


def _kill(kind: str) -> None:
    """Kill a worker, as soon as there is one: tasks of Ray come and go."""
    while not (found := _worker_processes(TITLES[kind])):
        time.sleep(0.01)
    os.kill(found[0], signal.SIGKILL)


T = TypeVar("T")


def _apart(function: Callable[..., T], *arguments: Any) -> T:
    """Result of a function in a process of its own: TensorFlow has threads, and this process is forked."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def _measured(folder: Path, kind: str, killed: bool) -> tuple[float, float, float, int]:
    """Seconds to the first batch, samples a second, longest wait in seconds, samples that are missing or twice."""
    began = time.perf_counter()
    peers = {"streaming_split": _of_ray_data, "tf.data": _of_tf_data}
    batches = peers[kind](folder) if kind in peers else _of_this(folder, kind)
    keys = list(next(batches))
    first = last = time.perf_counter()
    longest = 0.0
    for number, batch in enumerate(batches):
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
        keys += batch
        if killed and number == PICTURES * EPOCHS // BATCH // 3:
            _kill(kind)
    counts = dict.fromkeys(keys, 0)
    for key in keys:
        counts[key] += 1
    wrong = sum(abs(count - EPOCHS) for count in counts.values()) + EPOCHS * (PICTURES - len(counts))
    return first - began, (len(keys) - BATCH) / (last - first), longest, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="some kinds, by comma")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = _pictures(Path(name, "pictures"), PICTURES)
        rows = []
        kinds = [kind for kind in KINDS if kind in asked.only.split(",") or not asked.only]
        if {"ray", "streaming_split"} & {*kinds}:
            ray.init(address="local", num_cpus=WORKERS, log_to_driver=False)
            ray.data.DataContext.get_current().enable_progress_bars = False
        if "tf.data" in kinds:
            _apart(_write_records, folder)
        found: dict[tuple[str, bool], list[tuple[float, float, float, int]]] = {}
        for _ in range(asked.runs):
            for kind in kinds:
                for killed in (False, True):
                    measured = partial(_apart, _measured) if kind == "tf.data" else _measured
                    run = measured(folder, kind, killed)
                    found.setdefault((kind, killed), []).append(run)
                    print(kind, killed, run, f"load {os.getloadavg()[0]:.1f}", flush=True)
        for (kind, killed), runs in found.items():
            first, rate, longest, wrong = zip(*runs, strict=True)
            row = [kind, "one worker" if killed else "", spread(first, 2), spread(rate, 0), spread(longest, 2)]
            rows.append([*row, max(wrong)])
        print(table(["workers", "killed", "first batch, s", "samples/s", "longest wait, s", "missing or twice"], rows))


if __name__ == "__main__":
    main()
