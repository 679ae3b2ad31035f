"""Balance on real ranks: a small vision-language model on gloo, with steps as they are packed, and with planned ones.

A folder of texts, some of them with a clip of images of its own size, is trained on by the reference trainer's model
with an image encoder that costs more than the language model. Two mixes: ``often``, one in twenty has a clip of 8 to 32
images; ``rarely``, about one in each step, of 96 to 160 larger ones.

Variants: micro-batches as ``best_fit`` packs them; ``costs``, the same samples of each step dealt by a plan; and that
with ``share_images``, so that ranks encode each other's images. After that, the planned run goes from 4 to 2 to 3 to 4
ranks, and has the same samples in each step.

How to read it: a machine with fewer cores than ranks works through the same total, however it is dealt. So beside the
wall clock there is the processor time of the busiest rank ("busiest"), which is what a step takes if each rank has a
core of its own. Both are means over steps. Losses are compared with those of the first variant, step by step.

    python tools/bench/balance_ranks.py [--mix rarely] [--ranks 4] [--steps 12]
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, table

STEP, CAPACITY, PATCH = 12, 600, 4
MODEL = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 160, "vocab_size": 64}
VISION = {"hidden_size": 96, "num_layers": 3, "num_heads": 4, "ffn_size": 384, "pooling": "mean"}
#: How many samples have a clip, of how many images, and of how many patches to a side.
MIXES = {"often": (0.05, (8, 33), (5, 14)), "rarely": (1 / 96, (96, 161), (11, 14))}
VARIANTS: dict[str, tuple[bool, bool]] = {
    "as packed": (False, False),
    "costs": (True, False),
    "costs, share_images": (True, True),
}


def make_data(folder: Path, samples: int, mix: str = "often") -> Path:
    """Samples that say how many tokens and images they have, and the columns that measuring would make of them."""
    from energon_lite.storage.index.columns import write_column
    from energon_lite.storage.prepare import prepare_dataset

    rng, (share, images_of, sides_of) = np.random.default_rng(0), MIXES[mix]
    folder.mkdir()
    columns: dict[str, list[int]] = {name: [] for name in ("length", "images", "patches", "squared_patches")}
    with tarfile.open(folder / "data-000.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(samples):
            images = int(rng.integers(*images_of)) if rng.random() < share else 0
            sides = (PATCH * np.repeat(rng.integers(*sides_of, 1), images)).tolist()
            tokens = int(np.clip(rng.lognormal(4, 0.7), 8, 400)) + images
            patches = [(side // PATCH) ** 2 for side in sides]
            for name, value in zip(
                columns, (tokens, images, sum(patches), sum(one**2 for one in patches)), strict=True
            ):
                columns[name].append(value)
            data = json.dumps({"tokens": tokens, "sides": sides}).encode()
            info = tarfile.TarInfo(f"{number:06d}.json")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    prepare_dataset(folder, split_parts={"train": ".*"}, crude=True, workers=1)
    for name, values in columns.items():
        write_column(folder, name, np.array(values))
    return folder


def task_encoder(model: Any) -> Any:
    """Rows of what the samples say: tokens and images at random, the same each time."""
    import torch

    from energon_lite import Cooker, TaskEncoder, basic_sample_keys, pack_sequences, stateless
    from energon_lite.batching import TokenSequence
    from energon_lite.trainer.data.rows import RowsTaskEncoder

    def cook(sample: Any) -> TokenSequence:
        said = sample["json"]
        number = int(str(sample["__key__"]).rsplit("/", 1)[-1].split(".")[0])
        drawn = torch.Generator().manual_seed(number)
        tokens = torch.randint(1, 64, (said["tokens"],), generator=drawn)
        sides = said["sides"]
        media = None
        if sides:
            images = torch.rand(len(sides), 3, sides[0], sides[0], generator=drawn)
            media = {"image": images, "image_starts": torch.arange(len(sides))}
        return TokenSequence(**basic_sample_keys(sample), tokens=tokens, labels=tokens.roll(-1), media=media)

    class Encoder(TaskEncoder):
        cookers = (Cooker(cook),)

        @stateless
        def batch(self, samples: list[TokenSequence]) -> Any:
            return pack_sequences(samples, pad=0)

    return RowsTaskEncoder(Encoder(), model)


def model_config() -> Any:
    from energon_lite.trainer.models.config import ModelConfig, VisionConfig

    vision = VisionConfig(**VISION)  # type: ignore[arg-type]
    return ModelConfig(**MODEL, image_size=52, patch_size=PATCH, vision=vision)  # type: ignore[arg-type]


def cost_model() -> Any:
    """What follows from the model's shape."""
    from energon_lite.extras.balance.cost_model import CostModel
    from energon_lite.trainer.training.throughput import encoder_shape, language_shape

    config = model_config()
    return CostModel.of_shape(language_shape(config), encoder_shape(config))


def loader_of(folder: Path, rank: int, world: int, *, planned: bool) -> Any:
    from energon_lite import BestFit, ByTokens, Capacity, WorkerConfig, get_savable_loader, get_train_dataset

    more = {"micro_batches_per_step": STEP, "costs": cost_model()} if planned else {}
    dataset = get_train_dataset(
        folder,
        worker_config=WorkerConfig(rank=rank, world_size=world, num_workers=0),
        batch_size=None,
        batching=ByTokens(BestFit(Capacity(CAPACITY)), **more),  # type: ignore[arg-type]
        task_encoder=task_encoder(model_config()),
    )
    return get_savable_loader(dataset)


def samples_of(batches: list[Any]) -> list[str]:
    return sorted(key for batch in batches for key in batch.__key__)


def train(folder: Path, steps: int, variant: str, rank: int, world: int) -> dict[str, Any]:
    """Losses, seconds and processor seconds of each step, and the samples in it."""
    import torch

    from energon_lite.trainer.models.llama import LlamaModel
    from energon_lite.trainer.optimizer.config import OptimizerConfig
    from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
    from energon_lite.trainer.parallel.mesh import build_mesh
    from energon_lite.trainer.training.step import train_step

    torch.set_num_threads(1)
    planned, share = VARIANTS[variant]
    mesh = build_mesh(share_images=share)
    model = LlamaModel(model_config(), mesh, seed=1)
    optimizer = OverlappedDistributedOptimizer(model, mesh, OptimizerConfig(lr=1e-3))
    found: dict[str, Any] = {"losses": [], "seconds": [], "busy": [], "samples": []}
    with loader_of(folder, rank, world, planned=planned) as loader:
        batches = iter(loader)
        for _ in range(steps):
            mine = [next(batches) for _ in range(STEP // world)]
            mesh.barrier()
            began, worked = time.perf_counter(), time.process_time()
            result = train_step(model, optimizer, mine, mesh, lr=1e-3)
            found["seconds"].append(time.perf_counter() - began)
            found["busy"].append(time.process_time() - worked)
            found["losses"].append(result.loss)
            found["samples"].append(samples_of(mine))
    return found


def part_of_run(folder: Path, state: Any, steps: int, rank: int, world: int) -> tuple[list[list[str]], Any]:
    """The samples of some steps from a state on, and the state behind them."""
    with loader_of(folder, rank, world, planned=True) as loader:
        if state is not None:
            loader.restore_state_global(state)
        batches = iter(loader)
        found = [samples_of([next(batches) for _ in range(STEP // world)]) for _ in range(steps)]
        return found, loader.save_state_global(0) if world > 1 else [loader.save_state_rank()]


def on_ranks(world: int, work: Callable[[int], Any]) -> list[Any]:
    """What each rank's ``work(rank)`` returns; the ranks are a gloo group."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(target=_rank, args=(rank, world, folder, pipes[rank][1], work)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        for _, write in pipes:
            write.close()
        found = [read.recv() for read, _ in pipes]
        for process in processes:
            process.join()
    return found


def _rank(rank: int, world: int, folder: str, pipe: Any, work: Callable[[int], Any]) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    pipe.send(work(rank))
    dist.barrier()
    dist.destroy_process_group()


def together(parts: list[list[list[str]]]) -> list[list[str]]:
    """The samples of each step, of all ranks."""
    return [sorted(key for keys in step for key in keys) for step in zip(*parts, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", choices=list(MIXES), default="often")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each variant, in turn")
    parser.add_argument("--samples", type=int, default=6000)
    arguments = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = make_data(Path(name) / "data", arguments.samples, arguments.mix)
        runs: dict[str, list[list[dict[str, Any]]]] = {variant: [] for variant in VARIANTS}
        for _ in range(arguments.rounds):
            for variant in VARIANTS:
                runs[variant].append(
                    on_ranks(
                        arguments.ranks,
                        lambda rank, variant=variant: train(folder, arguments.steps, variant, rank, arguments.ranks),
                    )
                )
        report(runs)
        parts = on_ranks(arguments.ranks, lambda rank: part_of_run(folder, None, 12, rank, arguments.ranks))
        whole = together([part for part, _ in parts])
        state, seen = None, []
        for world in (4, 2, 3, 4):
            parts = on_ranks(world, lambda rank, state=state, world=world: part_of_run(folder, state, 3, rank, world))
            seen += together([part for part, _ in parts])
            state = next(one for _, one in parts if one is not None)
        equal = seen == whole
    print(f"\n4 -> 2 -> 3 -> 4 ranks, 3 steps each: the samples of each step are {'equal' if equal else 'OTHERS'}")


def report(runs: dict[str, list[list[dict[str, Any]]]]) -> None:
    base, rows = runs["as packed"], []
    for variant, of_variant in runs.items():
        busiest = [max(times) for run in of_variant for times in zip(*(one["busy"] for one in run), strict=True)]
        total = [sum(times) for run in of_variant for times in zip(*(one["busy"] for one in run), strict=True)]
        wall = [max(times) for run in of_variant for times in zip(*(one["seconds"] for one in run), strict=True)]
        apart = max(abs(a / b - 1) for a, b in zip(of_variant[0][0]["losses"], base[0][0]["losses"], strict=True))
        same = together([one["samples"] for one in of_variant[0]]) == together([one["samples"] for one in base[0]])
        ranks = len(of_variant[0])
        rows.append(
            [
                variant,
                statistics.fmean(busiest),
                statistics.fmean(total) / ranks / statistics.fmean(busiest),
                statistics.fmean(wall),
                f"{apart:.1e}",
                "equal" if same else "OTHERS",
            ]
        )
    first = rows[0][1]
    shown = [
        [name, f"{1000 * busy:.0f}", f"{first / busy:.2f}", f"{even:.3f}", f"{1000 * wall:.0f}", *more]
        for name, busy, even, wall, *more in rows
    ]
    print(table(("steps", "busiest, ms", "faster", "mean / max", "wall, ms", "losses apart", "samples"), shown))


if __name__ == "__main__":
    main()
