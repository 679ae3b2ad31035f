"""Examples that run here: the configurations that come along, at toy size; scripts; and a run that moves to other
ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from energon_lite.trainer import load_config
from examples.frameworks import with_distributed_checkpoint
from examples.toy_data import make_toy_data
from tests.fork_server import run_program
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.small_runs import metrics, train

EXAMPLES = Path(__file__).parents[3] / "examples"
#: Configurations with a layout for each: what is planned by tokens goes over stages, too.
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
    shutil.copytree(EXAMPLES / "configs", root / "examples/configs")
    make_toy_data(root / "toy-data", texts=12, chats=16, pictures=20)
    return root


def test_each_configuration_has_a_toy() -> None:
    names = {path.stem for path in (EXAMPLES / "configs").glob("*.yaml")}
    assert names - {"digits", "charts"} == RUNS.keys()  # these make data of their own


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


@pytest.mark.slow
def test_the_example_trains_and_layers_of_another_library_make_the_same_run(blend: Path, tmp_path: Path) -> None:
    found = []
    for script in ("train", "swap_layers"):
        config = tmp_path / "run.yaml"
        config.write_text("data: {path: blend.yaml}\nmodel: {hidden_size: 16, num_layers: 2, image_size: 4}\n")
        overrides = [f"output={tmp_path / script}", "train.steps=3", "data.workers=1", "model.num_kv_heads=2"]
        command = [EXAMPLES / f"{script}.py", config, *overrides]
        done = run_program(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert script != "train" or "step 3 of 3: loss" in done.stderr, "an example shows its progress"
        found.append([entry["loss"] for entry in metrics(tmp_path / script)])
    assert "norms are transformers." in done.stdout
    assert found[0] == pytest.approx(found[1], rel=1e-6) and len(found[0]) == 3
    command = [EXAMPLES / "generate.py", tmp_path / "train/checkpoints", "white", "a", "--max-new-tokens=3"]
    done = run_program(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("white") and "\na" in done.stdout


def test_a_run_with_torchs_checkpoints_goes_on_with_other_ranks(
    tmp_path: Path, leaf_of: Callable[..., Path], run_ranks: RunRanks
) -> None:
    leaf, resumed = leaf_of(14, "ranks"), tmp_path / "resumed"

    def seen_by(world: int, until: int) -> list[str]:
        """The samples of all ranks in the order of the global sequence of batches, which have two."""
        by_rank = run_ranks(world, lambda rank: with_distributed_checkpoint.train(leaf, resumed, until))
        places = range(0, len(by_rank[0]), 2)
        return [key for place in places for keys in by_rank for key in keys[place : place + 2]]

    seen = [*seen_by(4, 5), *with_distributed_checkpoint.train(leaf, resumed, 10), *seen_by(2, 15)]
    assert seen == with_distributed_checkpoint.train(leaf, tmp_path / "undisturbed", 4 * 5 + 5 + 2 * 5)
