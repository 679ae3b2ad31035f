"""What programs for Energon's development branch import."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from energon_lite.extras.energon import MetadatasetV2
from energon_lite.extras.energon.compat import INTERNAL, MODULES
from energon_lite.extras.energon.compat.install import resolve
from energon_lite.extras.energon.compat.names import AHEAD_MODULES
from tests.fork_server import run_program

PROGRAM = """
import sys
import torch
from megatron.energon import DefaultTaskEncoder, Recipe, WorkerConfig, get_processing_dataset, get_savable_loader
from megatron.energon import get_train_dataset
from megatron.energon.dataloader import DataLoader, ForkDataLoaderWorker, ThreadDataLoaderWorker
from megatron.energon.recipe.loader import traverse_recipe


class Asker(DefaultTaskEncoder):
    def encode_sample(self, sample):
        assert torch.utils.data.get_worker_info().num_workers == 2
        return sample


def main(path, recipe):
    text = "{__module__: megatron.energon, __class__: Recipe, splits: {train: {path: " + path + "}}}"
    open(recipe, "w").write(text)
    print([one.path.name for one in traverse_recipe(recipe, split_part="train")], Recipe.__name__)
    given = {"batch_size": 2, "worker_config": WorkerConfig(rank=0, world_size=1, num_workers=2), "repeat": False}
    asked = get_train_dataset(recipe, task_encoder=Asker(), **given)
    with get_savable_loader(asked, multiprocessing_context="forkserver") as loader:
        print(len(list(loader)))
    for kind in (ForkDataLoaderWorker, ThreadDataLoaderWorker):
        with DataLoader(get_train_dataset(recipe, **given), worker_type=kind) as loader:
            print(len(loader), len(list(loader)))


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def test_all_names_are_there() -> None:
    for module, names in AHEAD_MODULES.items():
        assert not any(module.startswith(f"{start}.") for start in INTERNAL)
        for name in names.split():
            assert resolve(name, module) is not None
            assert module not in MODULES or name not in MODULES[module].split(), f"{module}.{name} is in 7.4.1, too"
    assert resolve("Recipe") is MetadatasetV2


def test_a_program(leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_program(
        ["-m", "energon_lite.extras.energon", str(tmp_path / "program.py"), str(leaf_of(5)), str(tmp_path / "a.yaml")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "['a-5'] MetadatasetV2\n3\n3 3\n3 3\n"
