"""What is in order passes, what is wrong is said with what to do; alone and together with other ranks."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import time
from collections import namedtuple
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from examples.doctor import ranks
from examples.doctor.__main__ import examine, main, report_lines
from examples.doctor.machine import Finding, accelerators, disk, launch, limits, shared_memory
from examples.doctor.ranks import alike, clocks, link_speed, own_facts
from tests.trainer.parallel.rank_processes import RunRanks

GIB = 2**30
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def wrong(findings: Iterable[Finding], level: str = "wrong") -> str:
    """The texts of what is wrong; each says what to do."""
    found = [finding for finding in findings if finding.level == level]
    assert all(finding.fix for finding in found)
    return "; ".join(finding.text for finding in found)


@pytest.mark.parametrize(
    ("environment", "words", "warning"),
    [
        (TORCHRUN, "", ""),
        (TORCHRUN | {"WORLD_SIZE": ""}, "but not WORLD_SIZE", ""),
        (TORCHRUN | {"MASTER_ADDR": "", "MASTER_PORT": ""}, "but not MASTER_ADDR, MASTER_PORT", ""),
        (TORCHRUN | {"RANK": "one"}, "RANK='one' is not a number", ""),
        (TORCHRUN | {"RANK": "2"}, "RANK=2 of WORLD_SIZE=2", ""),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "host-0"}, "", ""),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, "", "only 1 of 2 ranks are started here"),
        ({}, "", ""),
        # The script of a Slurm job itself is one process, whatever the job is to start.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "", ""),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "srun has started 4", ""),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun has started 2", ""),
        ({"PMI_SIZE": "2"}, "mpiexec has started 2", ""),
    ],
)
def test_ranks_of_launchers(environment: dict[str, str], words: str, warning: str) -> None:
    for level, expected in (("wrong", words), ("warning", warning)):
        text = wrong(launch(environment), level)
        assert expected in text and bool(text) == bool(expected)


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(("free", "level"), [(64, "warning"), (1000, "warning"), (8000, "ok")])
def test_shared_memory_is_for_several_gpus(monkeypatch: pytest.MonkeyPatch, free: int, level: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(8192 << 20, 0, free << 20))
    alone = {**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}
    assert [one.level for told in ({}, alone, TORCHRUN) for one in shared_memory(told)] == ["ok"] * 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [one.level for told in ({}, alone) for one in shared_memory(told)] == ["ok"] * 2
    (found,) = shared_memory(TORCHRUN)
    assert found.level == level and bool(found.fix) == (level != "ok")


def test_no_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere")
    assert [one.level for one in shared_memory(TORCHRUN, path)] == ["ok"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert f"{path}: No such file" in wrong(shared_memory(TORCHRUN, path), "warning")


@pytest.mark.parametrize(("soft", "level"), [(256, "wrong"), (1024, "warning"), (65536, "ok"), (-1, "ok")])
def test_open_files(monkeypatch: pytest.MonkeyPatch, soft: int, level: str) -> None:
    assert resource.RLIM_INFINITY == -1
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, -1))
    assert next(limits()).level == level


@pytest.mark.parametrize(("free", "level"), [(GIB // 2, "wrong"), (5 * GIB, "warning"), (500 * GIB, "ok")])
def test_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, level: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1000 * GIB, 0, free))
    (found,) = disk(str(tmp_path / "not" / "yet"))
    assert found.level == level and str(tmp_path) in found.text
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "cannot be written" in wrong(disk(str(tmp_path)))


def test_a_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    driver = tmp_path / "version"
    assert wrong(accelerators({}, driver)) == ""
    driver.touch()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in wrong(accelerators({}, driver))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "CUDA_VISIBLE_DEVICES=''" in wrong(accelerators({"CUDA_VISIBLE_DEVICES": ""}, driver))


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "H100")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (79 * GIB, 80 * GIB))
    assert [found.text for found in accelerators({"LOCAL_RANK": "1"})] == ["2 x H100"]
    assert "local rank 2 has no GPU: there are 2" in wrong(accelerators({"LOCAL_RANK": "2"}))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (40 * GIB, 80 * GIB))
    assert "40.0 of 80.0 GiB" in wrong(accelerators({}), "warning")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert "without NCCL" in wrong(accelerators({}))


def test_ranks_that_differ() -> None:
    fact = replace(own_facts(), host="a", device="cuda:0")
    assert wrong(alike([fact, replace(fact, host="b"), replace(fact, device="cuda:1")])) == ""
    assert "ranks 0, 2 all use cuda:0 of a" in wrong(alike([fact, replace(fact, host="b"), fact]))
    other = replace(fact, host="b", versions=(("torch", "1.0"), *fact.versions[1:]))
    assert f"versions of torch: 1.0, {torch.__version__}" in wrong(alike([fact, other]))


def test_what_is_shown_of_many_ranks() -> None:
    low = Finding("disk", "1 GiB", "wrong", "remove something")
    ranks = [[Finding("cores", str(rank)), *([low] if rank in (1, 2, 3, 5) else [])] for rank in range(8)]
    assert list(report_lines(ranks)) == [
        "ok       cores  0",
        "wrong    disk   1 GiB  [ranks 1-3, 5]",
        "                -> remove something",
    ]


def test_two_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    def job(rank: int) -> tuple[bool, str, str]:
        report = examine(str(tmp_path), megabytes=1, environment=TORCHRUN | {"RANK": str(rank)})
        # Of the machine that the tests run on, nothing is asked.
        together = [one for one in report.by_rank[0] if one.topic in ("ranks", "software", "machines", "links")]
        return report.speaks, wrong(together), "\n".join(report_lines(report.by_rank))

    (speaks, faults, text), (quiet, _, _) = run_ranks(2, job)
    assert speaks and not quiet and faults == ""
    assert "1 for 2 ranks" in text and "GB/s by gloo, 1 MB summed over 2 ranks" in text


def test_what_one_rank_finds_is_told_by_rank_0(run_ranks: RunRanks, tmp_path: Path) -> None:
    def job(rank: int) -> tuple[int, list[str]]:
        if rank == 1:  # told, not set: what was open before may be more than that
            resource.getrlimit = lambda which: (1000, 1000)
        report = examine(str(tmp_path), megabytes=1, environment=TORCHRUN | {"RANK": str(rank)})
        return report.wrong, list(report_lines(report.by_rank))

    number, lines = run_ranks(2, job)[0]
    assert number >= 1
    assert any(line.startswith("wrong    open files") and line.endswith("[rank 1]") for line in lines)


@pytest.mark.parametrize(("error", "level"), [(100.0, "wrong"), (-100.0, "wrong"), (0.0, "ok")])
def test_clocks_of_other_machines(run_ranks: RunRanks, error: float, level: str) -> None:
    facts = [replace(own_facts(), host=host) for host in ("a", "a", "b")]

    def job(rank: int) -> list[Finding]:
        if rank == 2:
            ranks.time = SimpleNamespace(time=lambda: time.time() + error)  # type: ignore[assignment]
        return clocks(facts, None)

    (found,), *others = run_ranks(3, job)
    assert others == [[], []]
    assert found.level == level and "that of b is" in found.text
    if error:
        shown, at_most = (float(found.text.split()[place]) for place in (4, 8))
        assert shown == pytest.approx(100.0, abs=at_most + 0.01)
        assert ("ahead" if error > 0 else "behind") in found.text


def test_slow_and_broken_links(run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(rank: int) -> list[Finding]:
        return link_speed(torch.device("cpu"), 1, least=1e9)

    found = run_ranks(2, slow)
    assert found[0] == found[1] and "GB/s" in wrong(found[0], "warning")

    def broken(rank: int) -> list[Finding]:
        right = dist.all_reduce
        ranks.dist.all_reduce = lambda values: (right(values), values[:1].zero_())  # type: ignore[assignment]
        return link_speed(torch.device("cpu"), 1)

    assert wrong(run_ranks(2, broken)[1]) == "a sum over 2 ranks of ones is 0 to 2"


def test_ranks_that_cannot_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in (TORCHRUN | {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}).items():
        monkeypatch.setenv(name, value)
    report = examine(str(tmp_path), timeout=1.0)
    assert "ranks cannot talk within 1 s" in wrong(report.by_rank[0])


def test_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["doctor", "--path", str(tmp_path)])
    sizes = {"/dev/shm": Usage(64 << 20, 0, 64 << 20)}  # which ends no job
    monkeypatch.setattr(shutil, "disk_usage", lambda path: sizes.get(path, Usage(1000 * GIB, 0, 500 * GIB)))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    main()
    out = capsys.readouterr().out
    assert "0.06 of 0.06 GiB free in /dev/shm" in out and out.endswith("nothing is wrong\n")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 65536))
    with pytest.raises(SystemExit) as end:
        main()
    out = capsys.readouterr().out
    assert end.value.code == 1 and "1 thing is wrong" in out and "-> ulimit -n 65536" in out
