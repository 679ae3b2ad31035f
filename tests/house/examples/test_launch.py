"""The launch scripts are well-formed, run the same script, and the runs that they start come to their end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.testing import free_port, write_dataset

ROOT = Path(__file__).parents[3]
LAUNCH = ROOT / "examples" / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_well_formed_and_run_the_same(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert "set -euo pipefail" in text
    last = text.rstrip().rsplit("\n", 1)[1]
    assert last.endswith(('"$train" "$@"', 'examples/train.py "$@"'))
    assert script.suffix == ".sbatch" or os.access(script, os.X_OK)
    assert script.name in (ROOT / "docs" / "launching.md").read_text()


def test_slurm_options_come_first() -> None:
    lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    assert lines[0].startswith("#!")
    # Slurm reads its options up to the first command.
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert options and max(options) < first
    assert "#SBATCH --ntasks-per-node=1" in lines


def test_the_job_for_kubernetes() -> None:
    job = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    pod = replicas["Master"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    assert container["command"][0] == "torchrun" and container["command"][-1] == "examples/train.py"
    assert (ROOT / container["args"][0]).is_file()
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == job["spec"]["nprocPerNode"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    memory = next(mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm")
    assert next(volume for volume in pod["volumes"] if volume["name"] == memory)["emptyDir"]["medium"] == "Memory"


# -- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Path:
    texts = {f"{part}.tar": [(f"{n:02d}", {"txt": b"some text"}) for n in range(16)] for part in ("train", "val")}
    write_dataset(tmp_path / "texts", texts, splits={"train": ["train.tar"], "val": ["val.tar"]})
    path = tmp_path / "run.yaml"
    path.write_text(
        f"output: {tmp_path}/output\n"
        "data: {path: texts, micro_batch_size: 2, micro_batches_per_step: 2, workers: 0, max_length: 8}\n"
        "model: {hidden_size: 32, num_layers: 1, num_heads: 2, ffn_size: 32}\n"
        "train: {steps: 50}\n"
    )
    return path


def environment(tmp_path: Path, **more: object) -> dict[str, str]:
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    found = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "PET_", "MASTER"))}
    found |= {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return found | {key: str(value) for key, value in more.items()}


def run_all(commands: list[list[str]], environments: list[dict[str, str]]) -> str:
    """Run commands at once; return what they said."""
    processes = [
        subprocess.Popen(command, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for command, env in zip(commands, environments, strict=True)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)
    return "\n".join(said)


def steps_done(config: Path) -> list[int]:
    lines = (config.parent / "output" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.nightly  # the documentation's own example is run each time
def test_one_machine(tmp_path: Path, config: Path) -> None:
    run_all([[str(LAUNCH / "one_node.sh"), str(config), "train.steps=2"]], [environment(tmp_path, RANKS=2)])
    assert steps_done(config) == [1, 2]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["static", "elastic", "kubernetes"])
def test_two_machines(tmp_path: Path, config: Path, kind: str) -> None:
    """Two launchers on this machine, as if they were on two."""
    common = {"FIRST": "localhost", "PORT": free_port(), "RANKS": 1}
    script = [str(LAUNCH / f"nodes_{kind}.sh"), str(config), "train.steps=2"]
    if kind == "elastic":
        environments = [environment(tmp_path, **common, NODES="2:2", JOB="test")] * 2
    elif kind == "static":
        environments = [environment(tmp_path, **common, NODES=2, NODE=node) for node in (0, 1)]
    else:
        # What the operator sets.
        job = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())["spec"]["pytorchReplicaSpecs"]["Master"]
        script = [*job["template"]["spec"]["containers"][0]["command"], str(config), "train.steps=2"]
        told = {"NNODES": 2, "NPROC_PER_NODE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
        pet = {f"PET_{name}": value for name, value in told.items()}
        environments = [environment(tmp_path, **pet, PET_NODE_RANK=node) for node in (0, 1)]
    run_all([script] * 2, environments)
    assert steps_done(config) == [1, 2]


@pytest.mark.nightly
def test_slurm(tmp_path: Path, config: Path) -> None:
    """A job of two machines, where ``srun`` starts both here."""
    for name, text in (
        ("scontrol", "echo localhost\necho localhost\n"),
        ("srun", 'shift\n"$@" &\nfirst=$!\n"$@" &\nwait $first && wait $!\n'),
    ):
        (tmp_path / name).write_text("#!/bin/bash\n" + text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": 2, "SLURM_JOB_ID": free_port(), "RANKS": 1}
    script = ["bash", str(LAUNCH / "slurm.sbatch"), str(config), "train.steps=2"]
    said = run_all([script], [environment(tmp_path, **job)])
    assert "nothing is wrong" in said and "GB/s by gloo" in said
    assert steps_done(config) == [1, 2]
