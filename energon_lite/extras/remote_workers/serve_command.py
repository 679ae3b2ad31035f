"""``energon-lite serve``: workers for trainers on other machines."""

from __future__ import annotations

import inspect
import logging
import signal
import sys
from contextlib import suppress
from typing import Any

import click

from energon_lite.cli import parse_bytes
from energon_lite.errors import UsageError
from energon_lite.extras import wire
from energon_lite.extras.remote_workers.described import TlsFiles, host_and_port, secret_in
from energon_lite.extras.remote_workers.server import JobServer
from energon_lite.imports import find_named
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.topology import usable_cores
from energon_lite.worker_config import WorkerConfig


@click.command(name="serve", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("dataset", metavar="MODULE:FUNCTION")
@click.option("--listen", required=True, metavar="HOST:PORT", help="Address to listen at.")
@click.option("--workers", type=click.IntRange(min=1), help="Worker processes.  [default: one for each core]")
@click.option("--secret-file", type=click.Path(), help="File with the secret that trainers know.")
@click.option("--tls-certificate", type=click.Path(), help="Certificate of this server, PEM.")
@click.option("--tls-key", type=click.Path(), help="Its key, PEM.")
@click.option("--tls-authority", type=click.Path(), help="Authority that has signed the trainers' certificates, PEM.")
@click.option("--seed-offset", type=int, default=0, show_default=True, help="As in the trainer's WorkerConfig.")
@click.option("--max-bytes", default="1GiB", show_default=True, help="Size of a message of a trainer, at most.")
def command(dataset: str, listen: str, workers: int | None, secret_file: str | None, **given: Any) -> None:
    """Run workers for trainers on other machines.

    MODULE:FUNCTION returns the data set that the trainer loads. If it takes an argument, it gets a WorkerConfig.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    host, port = host_and_port(listen)
    files = [given[f"tls_{name}"] for name in ("certificate", "key", "authority")]
    if any(files) and not all(files):
        raise UsageError("some files of TLS are missing", fix="give --tls-certificate, --tls-key and --tls-authority")
    tls = TlsFiles(certificate=files[0], key=files[1], authority=files[2]) if all(files) else None
    secret = secret_in(secret_file)
    server = JobServer(
        _made(dataset, given["seed_offset"]),
        host,
        port,
        workers=workers or usable_cores(),
        secret=secret,
        tls=tls,
        max_bytes=parse_bytes(given["max_bytes"]),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with suppress(KeyboardInterrupt):
        server.run()


def _made(text: str, seed_offset: int) -> SavableDataset:
    """Return the data set that a function makes."""
    make: Any = find_named(
        text, option="the argument", form="MODULE:FUNCTION", example="my_train:make_dataset", wanted="the function"
    )
    wire.SCRIPTS.append(text.partition(":")[0])
    config = WorkerConfig(0, 1, seed_offset=seed_offset)
    made = make(config) if inspect.signature(make).parameters else make()
    if not isinstance(made, SavableDataset):
        raise UsageError(
            f"{text} returned a {type(made).__name__}", fix="return what get_train_dataset or get_val_dataset returned"
        )
    return made
