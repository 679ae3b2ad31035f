"""Megatron-Bridge's data path, run as it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("megatron", "megatron.core", "megatron.bridge")),
    reason="megatron-bridge is not installed: pip install --no-deps megatron-core==0.16.1 megatron-bridge==0.3.1",
)
def test_its_provider_runs_over_our_names_and_ours_is_saved_and_resumed(
    tmp_path: Path, leaf_of: Callable[..., Path]
) -> None:
    code = "import tests.extras.frameworks.bridge_run as run, sys; run.main(*sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(leaf_of(12)), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["flags"] == [True, True, True]
    assert sorted(key for keys in found["theirs"] for key in keys) == sorted(f"a-{number}" for number in range(12))
    assert found["again"] == found["theirs"]
    assert found["their validation"] == [2, 2]
    # It hands on a generator, which has no state; so its own provider cannot be resumed, over whichever library.
    assert "Could not find a save_state" in found["their saving"]

    assert (tmp_path / "iter_0000003" / "train_dataloader_dprank000.pt").exists()
    expected, resumed = found["ours"]
    assert resumed == expected
    assert found["our validation"] == [["a-0", "a-1"], ["a-2", "a-3"]]
