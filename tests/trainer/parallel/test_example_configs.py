"""The configurations that come along run here, at toy size, by one override."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from energon_lite.trainer import load_config
from examples.toy_data import make_toy_data
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.small_runs import train

CONFIGS = Path(__file__).parents[3] / "examples/configs"
#: With a layout for each: what is planned by tokens goes over stages, too.
RUNS = {
    "pretrain-160M": (1, []),
    "pretrain-1.1B": (2, ["mesh.pp=2"]),
    "finetune-chat": (2, []),
    "vision-language": (2, ["mesh.tp=2"]),
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the configurations, and the data beside it."""
    root = tmp_path_factory.mktemp("toy")
    shutil.copytree(CONFIGS, root / "examples/configs")
    make_toy_data(root / "toy-data", texts=12, chats=16, pictures=20)
    return root


def test_each_configuration_has_a_toy() -> None:
    names = {path.stem for path in CONFIGS.glob("*.yaml")} - {"digits", "charts"}  # these make data of their own
    assert names == RUNS.keys()


@pytest.mark.parametrize("name", RUNS)
def test_it_runs_at_toy_size(run_ranks: RunRanks, toy: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(toy)  # where `output` and `train.init_from` count from
    world, layout = RUNS[name]
    path = toy / f"examples/configs/{name}.yaml"
    # Fewer steps than a toy has: but for the numbers of them, one override does it.
    few = ["train.steps=2", "train.save_every=0", "train.eval_every=2", "train.eval_batches=2", "data.workers=0"]
    config = load_config(path, ["variant=toy", *few, *layout])
    assert run_ranks(world, lambda rank: train(config)) == [2] * world
    lines = [json.loads(line) for line in (toy / config.output / "metrics.jsonl").read_text().splitlines()]
    assert all(line["loss"] > 0 for line in lines if line["step"]) and lines[-1]["step"] == 2
    assert any(key.startswith("eval_loss") and lines[-1][key] > 0 for key in lines[-1])
