"""A blend of more data sets than a process may have files open."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from energon_lite import get_train_dataset
from tests.fork_server import run_program
from tests.testing import ALONE, blend_of, nightly_but, write_dataset

FILES, SHARDS, WORKERS = 256, 16, 4

PROGRAM = """
import json, os, resource, sys

resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.storage.files import stored_array

if sys.argv[4] == "large":
    stored_array._KEPT = 64  # blocks are read again and again, as those of an index of gigabytes


def processor_seconds(pid):
    fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def count_files(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


if __name__ == "__main__":
    config = WorkerConfig(rank=0, world_size=1, num_workers=int(sys.argv[3]))
    dataset = get_train_dataset(sys.argv[1], batch_size=32, worker_config=config)
    with get_savable_loader(dataset, start_method=sys.argv[5]) as loader:
        batches = iter(loader)
        keys = [next(batches).__key__]
        workers = [worker.process.pid for worker in loader._workers.executor()._workers]
        start = max(map(processor_seconds, workers))
        keys += [batch.__key__ for _, batch in zip(range(59), batches)]
        files = [count_files(pid) for pid in ("self", *workers)]
        leaves = len(dataset.leaves)
        print(json.dumps({"keys": keys, "files": files, "leaves": leaves, "start": start,
                          "state": loader.save_state_rank(), "failed": loader.stats()["failed"],
                          "deaths": loader.stats()["worker_deaths"]}))
"""


def _blend(root: Path, leaves: int) -> Path:
    """So many data sets, all of them hard links to the files of one."""
    shards = {
        f"s{shard:02d}.tar": [(f"{shard}-{number}", {"txt": b"x"}) for number in range(2)] for shard in range(SHARDS)
    }
    first = write_dataset(root / "leaf-0", shards)
    get_train_dataset(first, batch_size=1, worker_config=ALONE)  # makes the index
    paths = [root / f"leaf-{number}" for number in range(leaves)]
    for leaf in paths[1:]:
        shutil.copytree(first, leaf, copy_function=os.link)
    blend = blend_of((path, 1 + number % 7) for number, path in enumerate(paths))
    (root / "blend.yaml").write_text(json.dumps(blend))  # JSON is YAML
    return root / "blend.yaml"


def _run(blend: Path, index: str, start_method: str) -> dict[str, Any]:
    program = blend.parent / "program.py"
    program.write_text(PROGRAM)
    command = [str(program), str(blend), str(FILES), str(WORKERS), index, start_method]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = run_program(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    "leaves, index, start_method",
    nightly_but(
        {0, 1},
        [
            *((300, "small", "fork"), (300, "large", "fork"), (300, "small", "forkserver")),
            *((1000, "small", "fork"), (1000, "small", "spawn"), (1000, "large", "forkserver")),
        ],
    ),
)
@pytest.mark.slow
def test_a_blend_within_few_open_files(leaves: int, index: str, start_method: str, tmp_path: Path) -> None:
    found = _run(_blend(tmp_path, leaves), index, start_method)
    assert found["leaves"] == leaves and len(found["files"]) == 1 + WORKERS
    assert max(found["files"]) < FILES // 2, "there is little room for anything else"
    assert found["start"] < 3, "a worker opens leaves before it needs them"  # importing torch takes most of it
    assert found["failed"] == found["deaths"] == 0
    assert len(found["keys"]) == 60 and all(len(keys) == 32 for keys in found["keys"])
    assert len(json.dumps(found["state"])) <= 4096
