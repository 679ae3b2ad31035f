"""What users of other loaders report of imports and of databases, and does not happen here."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PROGRAM = """
import multiprocessing, os, random, signal, sys, threading
import numpy, torch

def seen():
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)]
    generators = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()
    return (dict(os.environ), multiprocessing.get_start_method(allow_none=True), torch.get_num_threads(),
            torch.multiprocessing.get_sharing_strategy(), handlers, generators, threading.active_count())

before = seen()
import energon_lite
for name in energon_lite.__all__:
    getattr(energon_lite, name)
assert seen() == before

from energon_lite import WorkerConfig, get_savable_loader, get_val_dataset
dataset = get_val_dataset(sys.argv[1], batch_size=1, worker_config=WorkerConfig(rank=0, world_size=1))
print(*(batch.__key__[0] for batch in get_savable_loader(dataset)), "sqlite3" in sys.modules)
"""


def test_an_import_changes_nothing_and_reading_needs_no_database(
    tmp_path: Path, write_dataset: Callable[..., Path]
) -> None:
    """Neither the environment, nor how processes are started, nor the global generators; and no thread is begun. The
    database is locked, as on some network file systems."""
    path = write_dataset(tmp_path / "data", {"s.tar": [(str(number), {"txt": b"x"}) for number in range(5)]})
    connection = sqlite3.connect(path / ".nv-meta" / "index.sqlite")
    connection.execute("CREATE TABLE samples (x)")
    connection.execute("BEGIN EXCLUSIVE")
    command = [sys.executable, "-c", PROGRAM, str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    connection.close()
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1", "2", "3", "4", "False"]
