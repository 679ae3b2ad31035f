"""The command that serves, as it is used: a script's own data set, a secret or certificates, another process."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.extras import wire
from energon_lite.extras.remote_workers import TcpWorkers, TlsFiles
from tests.core.laws.kinds import Noise
from tests.extras.remote_workers.served import serving
from tests.fork_server import ForkedProgram, run_program
from tests.testing import ALONE, batches_of, command, free_port, same, take, text_dataset, until

ROOT = Path(__file__).parents[3]

#: A training that prints the keys of its batches, all of which are made elsewhere.
SCRIPT = """
import sys
from dataclasses import dataclass

import torch
from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.extras.remote_workers import TcpWorkers, TlsFiles


@dataclass
class Numbers:
    keys: list
    numbers: torch.Tensor


class Encoder(TaskEncoder):
    def batch(self, samples):
        return Numbers([sample.__key__ for sample in samples], torch.tensor([len(s.text) for s in samples]))


def make_dataset(config):
    return get_train_dataset({data!r}, worker_config=config, batch_size=2, repeat=False, task_encoder=Encoder())


if __name__ == "__main__":
    workers = TcpWorkers({workers})
    with get_savable_loader(make_dataset(WorkerConfig(0, 1, workers=workers))) as loader:
        batches = list(loader)
    assert all(type(batch) is Numbers and min(batch.numbers) >= 3 for batch in batches)
    print(sorted(key for batch in batches for key in batch.keys))
"""
#: What it prints of seven samples.
SEVEN = f"{[f'a-{number}' for number in range(7)]}\n"


def write_script(path: Path, data: Path, workers: str = "") -> None:
    """Write the training, with the arguments of ``TcpWorkers``."""
    path.write_text(SCRIPT.format(data=str(data), workers=workers))


def test_a_script_and_its_server(leaf_of: Any, certificates: Path, tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem", "ca.pem"):
        (tmp_path / name).symlink_to(certificates / name)
    files = 'TlsFiles(certificate="cert.pem", key="key.pem", authority="ca.pem")'
    write_script(tmp_path / "my_train.py", leaf_of(7), f'[sys.argv[1]], secret_file="secret", tls={files}')
    (tmp_path / "secret").write_text("a secret of many letters")
    run = "from energon_lite.cli.main import main; main()"
    serve = ["-c", run, "serve", "my_train:make_dataset", "--workers", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "text": True}
    arguments = ["--listen", "127.0.0.1:0", "--secret-file", "secret", "--tls-certificate", "cert.pem"]
    arguments += ["--tls-key", "key.pem", "--tls-authority", "ca.pem"]
    with ForkedProgram([*serve, *arguments], stderr=subprocess.PIPE, **options) as server:
        assert server.stderr is not None
        line = next(line for line in server.stderr if "fingerprint" in line)
        (port,) = re.findall(r"at 127\.0\.0\.1(:\d+)", line)
        trained = run_program(["my_train.py", f"localhost{port}"], stdout=subprocess.PIPE, timeout=300, **options)
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0
    assert trained.returncode == 0 and trained.stdout == SEVEN


def test_arguments_that_cannot_work(tmp_path: Path) -> None:
    for arguments, text in (
        (["my_train", "--listen", "127.0.0.1:0"], "is not of the form MODULE:FUNCTION"),
        (["os:getcwd", "--listen", "127.0.0.1:0"], "returned a str"),
        (["os:getcwd", "--listen", "here"], "write host:port"),
        (["os:getcwd", "--listen", "127.0.0.1:0", "--tls-key", "key"], "some files of TLS are missing"),
    ):
        code, output = command("serve", *arguments)
        assert code == 1 and text in output, output


def test_classes_of_the_trainers_script_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in ``__main__`` there, and in a module that is imported here."""
    write_script(tmp_path / "a_script.py", text_dataset(tmp_path / "data", 4))
    monkeypatch.syspath_prepend(tmp_path)
    wire.known_class.cache_clear()
    monkeypatch.setattr(wire, "SCRIPTS", [])
    with pytest.raises(wire.UnknownClassError):
        wire.known_class("__main__:Numbers")
    code, output = command("serve", "a_script:make_dataset", "--listen", "127.0.0.1:0", "--max-bytes", "many")
    assert code == 1 and "many" in output
    assert wire.known_class("__main__:Numbers").__module__ == "a_script"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and a certificate for localhost that it has signed; and those of strangers."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    folder = tmp_path_factory.mktemp("certificates")
    for own in ("", "strange-"):
        authority = f"req -x509 -newkey rsa:2048 -nodes -keyout {own}ca.key -out {own}ca.pem -subj /CN={own}ca -days 2"
        request = f"req -newkey rsa:2048 -nodes -keyout {own}key.pem -out {own}csr.pem -subj /CN=localhost"
        (folder / "names").write_text("subjectAltName=DNS:localhost")
        sign = f"x509 -req -in {own}csr.pem -CA {own}ca.pem -CAkey {own}ca.key -CAcreateserial -out {own}cert.pem"
        for step in (authority, request, f"{sign} -days 2 -extfile names"):
            subprocess.run(["openssl", *step.split()], cwd=folder, check=True, capture_output=True)
    return folder


def test_tls(leaf_of: Any, certificates: Path) -> None:
    def files(own: str) -> TlsFiles:
        certificate, key = certificates / f"{own}cert.pem", certificates / f"{own}key.pem"
        return TlsFiles(certificate=certificate, key=key, authority=certificates / "ca.pem")

    def dataset(config: WorkerConfig) -> Any:
        return get_train_dataset(leaf_of(50), batch_size=4, worker_config=config, task_encoder=Noise())

    expected = batches_of(dataset(ALONE), 12)
    with serving(dataset(ALONE), tls=files("")) as served:
        config = WorkerConfig(0, 1, workers=TcpWorkers([f"localhost:{served.port}"], tls=files("")))
        assert same(batches_of(dataset(config), 12), expected)
        for wrong in (files("strange-"), None):
            before = served.refused
            config = WorkerConfig(0, 1, 1, workers=TcpWorkers([f"localhost:{served.port}"], tls=wrong))
            with get_savable_loader(dataset(config)) as loader:
                assert same(take(loader, 12), expected)  # by the local worker
                pool: Any = loader._workers.executor()
                assert until(lambda: bool(pool.load()) and served.refused > before)  # noqa: B023
                assert len(pool._workers) == 1


# -- the examples for Slurm and Kubernetes, at toy size: one machine stands for all ------------------------------------


EXAMPLES = ROOT / "examples" / "machines"


def _folder(tmp_path: Path, data: Path, workers: str) -> dict[str, str]:
    """Write the training; return the environment of its processes."""
    write_script(tmp_path / "my_train.py", data, workers)
    for name, text in (("scontrol", "echo localhost\n"), ("srun", 'shift\nexec "$@"\n')):
        (tmp_path / name).write_text("#!/bin/bash\n" + text)
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}


def _output(command: list[str], tmp_path: Path, environment: dict[str, str]) -> str:
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "text": True, "timeout": 300}
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, **options).stdout


@pytest.mark.slow
def test_slurm(tmp_path: Path, leaf_of: Any) -> None:
    environment = _folder(tmp_path, leaf_of(7), 'file="servers.txt", secret_file="secret"')
    job = {"SLURM_JOB_ID": str(free_port() - 20_000), "SLURM_JOB_NODELIST_HET_GROUP_1": "localhost"}
    command = ["bash", str(EXAMPLES / "slurm.sbatch"), "my_train.py", "my_train:make_dataset"]
    assert _output(command, tmp_path, environment | job) == SEVEN


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
    workers = f"[{here[f'0.0.0.0:{port}']!r}], secret_file={here[secret]!r}"
    environment = _folder(tmp_path, leaf_of(7), workers)
    (tmp_path / "secret").write_text(secrets.token_hex(32))
    command = [here.get(word, word) for word in [*container["command"], *container["args"]]]
    with _started(command, tmp_path, environment):
        assert _output([sys.executable, "my_train.py"], tmp_path, environment) == SEVEN
