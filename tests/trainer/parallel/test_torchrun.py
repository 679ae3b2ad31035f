"""Runs that torchrun starts again: one with a killed rank, and one of two hosts that are cut off from each other.

Each host is a network namespace with an agent of torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from energon_lite.trainer.training.config import config_to_dict
from tests.testing import script
from tests.trainer.parallel.small_runs import SmallRuns

ROOT = Path(__file__).parents[3]
STEPS = 30
TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
KILLED = """
import os, signal, sys
from tests.trainer.parallel.small_runs import Path, make_config, send, train

path, output, again = Path(sys.argv[1]), Path(sys.argv[2]), os.environ["TORCHELASTIC_RESTART_COUNT"]
kill = send(signal.SIGKILL, to_rank=1, at=4 if again == "0" else 0)
assert train(make_config(path, output, mesh={"tp": 2}, steps=5, async_save=False), kill) == 5
(output / f"restarts-{os.environ['RANK']}").write_text(again)
"""


@pytest.mark.nightly
def test_torchrun_starts_a_killed_run_again_where_it_was(runs: SmallRuns) -> None:
    """``--max-restarts``: the trainer goes on from its newest checkpoint by itself, to the same bits."""
    assert runs.train(2, name="straight", mesh={"tp": 2}, steps=5, async_save=False) == [5, 5]
    (runs.folder / "program.py").write_text(KILLED)
    again = runs.folder / "restarted"
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*command, str(runs.folder / "program.py"), str(runs.path), str(again)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(again / f"restarts-{rank}").read_text() for rank in range(2)] == ["1", "1"]
    assert runs.metrics("restarted") == runs.metrics("straight")


#: Seconds that a collective waits for a peer that is gone.
TIMEOUT = 6.0

TRAIN = """
import json, logging, sys, time
from energon_lite.trainer import Trainer, config_from_dict

logging.basicConfig(level=logging.INFO)
with Trainer(config_from_dict(json.load(open(sys.argv[1])))) as trainer:
    step = trainer.launch
    trainer.launch = lambda *given: (time.sleep(0.3), step(*given))[1]  # so that there is a middle to be cut off in
    trainer.run()
"""


two_hosts = script(ROOT / "tools/bench/two_hosts.py")


@pytest.fixture
def hosts() -> Iterator[Any]:
    if (missing := two_hosts.why_not()) is not None:
        pytest.skip(missing)
    with two_hosts.TwoHosts() as made:
        yield made


def wait_for(condition: Any, seconds: float, what: str, agents: list[Any]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come in {seconds:.0f} s"
        assert all(agent.poll() in (None, 0) for agent in agents), f"an agent has given up before {what}"
        time.sleep(0.2)


@pytest.mark.nightly
def test_a_host_that_is_cut_off_and_comes_back_changes_no_number(runs: SmallRuns, hosts: Any) -> None:
    runs.train(2, name="straight", steps=STEPS)
    cut = runs.config("cut", steps=STEPS, mesh={"timeout": TIMEOUT})
    (runs.folder / "config.json").write_text(json.dumps(config_to_dict(cut)))
    (runs.folder / "train.py").write_text(TRAIN)
    lines = runs.folder / "cut/metrics.jsonl"
    logs = [runs.folder / f"host{host}.log" for host in (0, 1)]

    def done() -> int:
        return len(lines.read_text().splitlines()) if lines.exists() else 0

    agents = []
    try:
        for host in (0, 1):
            command = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1"]
            command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.address(0)}:29400", "--rdzv-id=cut"]
            command += [f"--rdzv-conf=is_host={1 - host}", f"--local-addr={hosts.address(host)}", "--max-restarts=10"]
            command += ["--monitor-interval=0.5", str(runs.folder / "train.py"), str(runs.folder / "config.json")]
            log = logs[host].open("w")
            given = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            agents.append(hosts.start(host, command, given, stdout=log, stderr=log))
        wait_for(lambda: done() >= STEPS // 4, 180, "the first steps", agents)
        hosts.pull(1)
        before = done()
        time.sleep(TIMEOUT + 4)
        assert done() <= before + 1 < STEPS, "training went on without the host"
        hosts.plug(1)
        wait_for(lambda: all(agent.poll() == 0 for agent in agents), 240, "the end", agents)
    except BaseException:
        for host, log in enumerate(logs):
            print(f"--- host {host}\n{log.read_text()[-6000:]}")
        raise
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
    assert "resumed from" in logs[0].read_text()
    assert runs.metrics("cut") == runs.metrics("straight")
