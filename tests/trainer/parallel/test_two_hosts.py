"""Two hosts, each a network namespace with an agent of torchrun; one is cut off in mid-run and comes back."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from energon_lite.trainer.training.config import config_to_dict
from tests.testing import script
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.small_runs import make_config, metrics, train

ROOT = Path(__file__).parents[3]
STEPS = 30
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
def test_a_host_that_is_cut_off_and_comes_back_changes_no_number(
    run_ranks: RunRanks, blend: Path, tmp_path: Path, hosts: Any
) -> None:
    straight = make_config(blend, tmp_path / "straight", steps=STEPS)
    run_ranks(2, lambda rank: train(straight))
    cut = make_config(blend, tmp_path / "cut", steps=STEPS, mesh={"timeout": TIMEOUT})
    (tmp_path / "config.json").write_text(json.dumps(config_to_dict(cut)))
    (tmp_path / "train.py").write_text(TRAIN)
    lines = tmp_path / "cut/metrics.jsonl"

    def done() -> int:
        return len(lines.read_text().splitlines()) if lines.exists() else 0

    agents = []
    try:
        for host in (0, 1):
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "torch.distributed.run",
                "--nnodes=2",
                "--nproc-per-node=1",
            ]
            command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.address(0)}:29400", "--rdzv-id=cut"]
            command += [f"--rdzv-conf=is_host={1 - host}", f"--local-addr={hosts.address(host)}", "--max-restarts=10"]
            command += ["--monitor-interval=0.5", str(tmp_path / "train.py"), str(tmp_path / "config.json")]
            log = (tmp_path / f"host{host}.log").open("w")
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
        for host in (0, 1):
            print(f"--- host {host}\n{(tmp_path / f'host{host}.log').read_text()[-6000:]}")
        raise
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
    assert "resumed from" in (tmp_path / "host0.log").read_text()
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "straight")
