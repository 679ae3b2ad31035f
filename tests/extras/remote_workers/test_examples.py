"""The examples for Slurm and Kubernetes run here, at toy size: one machine stands for all."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.testing import free_port

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "machines"
#: A training that prints the keys of its batches, all of which are made elsewhere.
SCRIPT = """
from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.extras.remote_workers import TcpWorkers

def make_dataset(config):
    return get_train_dataset({data!r}, worker_config=config, batch_size=2, repeat=False)

if __name__ == "__main__":
    config = WorkerConfig(0, 1, workers=TcpWorkers({servers}, secret_file={secret!r}))
    with get_savable_loader(make_dataset(config)) as loader:
        print(sorted(key for batch in loader for key in batch.__key__))
"""


def _folder(tmp_path: Path, data: Path, servers: str, secret: str) -> dict[str, str]:
    """Write the training; return the environment of its processes."""
    (tmp_path / "my_train.py").write_text(SCRIPT.format(data=str(data), servers=servers, secret=secret))
    for name, text in (("scontrol", "echo localhost\n"), ("srun", 'shift\nexec "$@"\n')):
        (tmp_path / name).write_text("#!/bin/bash\n" + text)
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}


def _output(command: list[str], tmp_path: Path, environment: dict[str, str]) -> str:
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert not run.returncode, run.stderr
    return run.stdout


@pytest.mark.slow
def test_slurm(tmp_path: Path, leaf_of: Any) -> None:
    environment = _folder(tmp_path, leaf_of(7), 'file="servers.txt"', "secret")
    job = {"SLURM_JOB_ID": str(free_port() - 20_000), "SLURM_JOB_NODELIST_HET_GROUP_1": "localhost"}
    command = ["bash", str(EXAMPLES / "slurm.sbatch"), "my_train.py", "my_train:make_dataset"]
    assert _output(command, tmp_path, environment | job) == f"{[f'a-{n}' for n in range(7)]}\n"


@contextmanager
def _started(command: list[str], tmp_path: Path, environment: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen(command, cwd=tmp_path, env=environment)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
def test_kubernetes(tmp_path: Path, leaf_of: Any) -> None:
    service, deployment = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    name, port, secret = service["metadata"]["name"], service["spec"]["ports"][0]["port"], "/secret/secret"
    assert f'TcpWorkers(["{name}:{port}"], secret_file="{secret}")' in (EXAMPLES / "kubernetes.yaml").read_text()
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}

    here = {f"0.0.0.0:{port}": f"127.0.0.1:{free_port()}", secret: str(tmp_path / "secret"), "32": "1"}
    environment = _folder(tmp_path, leaf_of(7), f"[{here[f'0.0.0.0:{port}']!r}]", here[secret])
    (tmp_path / "secret").write_text(secrets.token_hex(32))
    command = [here.get(word, word) for word in [*container["command"], *container["args"]]]
    with _started(command, tmp_path, environment):
        said = _output([sys.executable, "my_train.py"], tmp_path, environment)
    assert said == f"{[f'a-{n}' for n in range(7)]}\n"
