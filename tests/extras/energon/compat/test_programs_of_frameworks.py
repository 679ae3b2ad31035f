"""Programs after the shape of what frameworks write around Energon, run unchanged by it and under its names here."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location("programs", Path(__file__).parent / "test_programs_of_energon.py")
assert _spec is not None and _spec.loader is not None
programs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(programs)


def both(program: str, ours: list[Any], theirs: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a program prints, by this library and by Energon."""
    path = programs.PROGRAMS / program
    found = programs.results([*programs.OURS, path, *ours]), programs.results([path, *theirs])
    assert tuple(one.pop("library") for one in found) == ("energon_lite", "megatron")
    return found


@pytest.mark.slow
def test_a_data_module_with_a_split_for_validation(tmp_path: Path, tools: Any) -> None:
    programs.write_captions(tmp_path / "theirs", 6, 0, 10, 4, tools)
    shutil.copytree(tmp_path / "theirs", tmp_path / "ours")
    arguments = [[tmp_path / name, tmp_path / f"{name}.pt"] for name in ("ours", "theirs")]
    ours, theirs = both("data_module.py", *arguments)
    for workers, batches in (("0 workers", 5), ("2 workers", 6)):
        shapes = ours[workers].pop("shapes"), theirs[workers].pop("shapes")
        assert [[shape[0] for shape in one] for one in shapes] == [[4] * 3] * 2
        assert ours[workers]["exact"] and ours[workers]["train"] and len(ours[workers]["val"][0]) == batches
    assert ours == theirs


@pytest.mark.slow
def test_a_packing_encoder_with_its_own_cookers_and_the_script_that_writes_its_data(tmp_path: Path) -> None:
    ours, theirs = both("packing_cookers.py", [tmp_path / "ours"], [tmp_path / "theirs"])
    assert all(ours[f"train, {workers} workers"]["exact"] for workers in (0, 2))
    val = ours.pop("val, 2 workers"), theirs.pop("val, 2 workers")  # which buffers are whose differs in a blend
    keys = [sorted(key for batch in one for pack in batch["keys"] for key in pack.split(",")) for one in val]
    assert keys[0] == keys[1] and len(keys[0]) == 24
    assert ours == theirs and ours["generic"]


def launch(how: list[Any], launcher: str, path: Path) -> list[dict[str, Any]]:
    """What two processes of a launcher print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(2):
        said: dict[str, str | int] = {"SLURM_PROCID": rank, "SLURM_NTASKS": 2, "SLURM_LOCALID": rank}
        if launcher == "torchrun":
            said = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**programs.ENVIRONMENT, **{name: str(value) for name, value in said.items()}}
        arguments = [sys.executable, *map(str, how), str(programs.PROGRAMS / "launched.py"), launcher, str(path)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(arguments, env=environment, cwd=programs.ROOT, **pipes))
    try:
        done = [(*one.communicate(timeout=200), one.returncode) for one in started]
    finally:
        for one in started:
            one.kill()
    assert [code for _, _, code in done] == [0, 0], done
    return [json.loads(out.strip().splitlines()[-1]) for out, _, _ in done]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_ranks_as_a_launcher_says_them(tmp_path: Path, tools: Any, launcher: str) -> None:
    programs.write_captions(tmp_path / "data", 6, 0, 10, 4, tools)
    ours, theirs = (launch(how, launcher, tmp_path / "data") for how in (list(programs.OURS), []))
    for found in (ours, theirs):
        assert [one["place"] for one in found] == [[0, 2], [1, 2]]
        assert sorted(found[0].pop("train") + found[1].pop("train")) == [f"k{number:03d}" for number in range(40)]
        assert {one.pop("library") for one in found} in ({"energon_lite"}, {"megatron"})
    assert ours == theirs and all(map(len, (one["val"] for one in ours)))


@pytest.mark.slow
def test_a_multimodal_encoder_that_yields_with_wrapped_validation(tmp_path: Path, tools: Any) -> None:
    programs.write_captions(tmp_path / "theirs", 6, 0, 10, 4, tools)
    shutil.copytree(tmp_path / "theirs", tmp_path / "ours")
    ours, theirs = both("yielding_encoder.py", [tmp_path / "ours"], [tmp_path / "theirs"])
    for workers, different in (("0 workers", 5), ("2 workers", 6)):
        assert ours[workers]["exact"] and ours[workers]["lengths"] == [[12, 12], [3, 3]]
        assert ours[workers]["different"] == different
    assert ours == theirs


@pytest.mark.slow
def test_torchrun_without_a_process_group_gives_no_sample_to_two_ranks(tmp_path: Path, tools: Any) -> None:
    """Energon, and this library before, take each of the processes for the only one."""
    programs.write_captions(tmp_path / "data", 6, 0, 10, 4, tools)
    code = (
        "import json, energon_lite as e\n"
        "config = e.WorkerConfig.default_worker_config(num_workers=0)\n"
        "class Keys(e.DefaultTaskEncoder):\n"
        "    def batch(self, samples): return [sample.__key__ for sample in samples]\n"
        f"data = e.get_val_dataset({str(tmp_path / 'data')!r}, split_part='val', batch_size=5, worker_config=config,"
        " task_encoder=Keys())\n"
        "print(json.dumps(list(e.get_savable_loader(data))))\n"
    )
    found = []
    for rank in range(2):
        said = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        environment = {**programs.ENVIRONMENT, **said, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        arguments: dict[str, Any] = {"env": environment, "cwd": programs.ROOT, "capture_output": True, "text": True}
        done = subprocess.run([sys.executable, "-c", code], timeout=200, **arguments)
        if done.returncode:
            assert "UsageError" in done.stderr and "rank" in done.stderr, done.stderr  # refused: fine, too
            return
        found += [key for batch in json.loads(done.stdout.splitlines()[-1]) for key in batch]
    assert sorted(found) == [f"k{number:03d}" for number in range(40, 60)]
