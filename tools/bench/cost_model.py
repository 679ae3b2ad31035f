r"""How well a fitted cost model predicts micro-batches that it was not fitted by: text and images, packed.

    python tools/bench/cost_model.py              # a small model, on a processor
    python tools/bench/cost_model.py --device cuda --hidden 1024 --layers 12 --vision 768 --vision-layers 12 \
        --capacity 8192

The model of the reference trainer runs micro-batches forward and backward; half of them fit the costs. Printed are the
mean relative error for the others, the share of them within 8 %, and the same for the costs by the model's shape
(scaled), and for tokens alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import numpy as np
import torch

from energon_lite.extras.balance import fit_costs
from energon_lite.extras.balance.cost_fit import relative_errors
from energon_lite.extras.balance.micro_batch_times import PassTimes, cost_model_of, micro_batch_numbers
from energon_lite.trainer.models.config import ModelConfig, VisionConfig
from energon_lite.trainer.models.interface import MultimodalBatch
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.training.pipeline import run_pipeline


def micro_batches(config: ModelConfig, capacity: int, count: int, seed: int) -> Iterator[MultimodalBatch]:
    """Packed rows of up to ``capacity`` tokens: documents of lognormal lengths, every second one with an image."""
    rng, patch = np.random.default_rng(seed), config.patch_size
    most = max(2, int((capacity / 4) ** 0.5))
    for _ in range(count):
        documents: list[int] = []
        images, starts, sizes = [], [], []
        fill = rng.uniform(0.3, 1.0) * capacity
        while True:
            text = int(rng.lognormal(np.log(capacity / 24), 1.0)) + 4
            size = None if rng.random() < 0.5 else [int(one) * patch for one in rng.integers(2, most + 1, 2)]
            length = text + (0 if size is None else config.image_tokens(*size))
            if len(documents) + length > fill and documents:
                break
            if len(documents) + length > capacity:
                continue
            if size is not None:
                starts.append(len(documents))
                sizes.append((size[0], size[1]))
                images.append(torch.rand(3, *size))
            documents += [len(sizes) + 1000 * text + len(documents)] * length
        pixels = torch.zeros(
            len(images), 3, max((h for h, _ in sizes), default=patch), max((w for _, w in sizes), default=patch)
        )
        for place, image in enumerate(images):
            pixels[place, :, : image.shape[1], : image.shape[2]] = image
        tokens = torch.from_numpy(rng.integers(0, config.vocab_size, (1, len(documents))))
        yield MultimodalBatch(
            __key__=[],
            __restore_key__=(),
            tokens=tokens,
            labels=tokens,
            loss_mask=torch.ones(tokens.shape),
            image=pixels,
            image_rows=torch.zeros(len(images), dtype=torch.int64),
            image_starts=torch.tensor(starts, dtype=torch.int64),
            documents=torch.tensor([documents]),
            image_sizes=sizes,
        )


def measured(model: LlamaModel, batches: list[MultimodalBatch], repeats: int) -> list[float]:
    """Seconds of each, the least of some repetitions."""
    found = np.full(len(batches), np.inf)
    for _ in range(repeats):
        for place, batch in enumerate(batches):
            passes = PassTimes(model.mesh.device)
            run_pipeline(model, [batch], record=passes)
            found[place] = min(found[place], passes.seconds(1)[0])
            model.zero_grad()
    return found.tolist()


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vision", type=int, default=192)
    parser.add_argument("--vision-layers", type=int, default=6)
    parser.add_argument("--capacity", type=int, default=1536)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=2)
    return parser


def errors_of(asked: argparse.Namespace) -> dict[str, np.ndarray]:
    """Relative errors for the micro-batches that were not fitted, by what predicts them."""
    vision = VisionConfig(
        hidden_size=asked.vision,
        num_layers=asked.vision_layers,
        num_heads=asked.vision // 32,
        ffn_size=4 * asked.vision,
    )
    config = ModelConfig(
        hidden_size=asked.hidden,
        num_layers=asked.layers,
        num_heads=asked.hidden // 32,
        ffn_size=8 * asked.hidden // 3,
        vocab_size=1024,
        image_size=32,
        patch_size=4,
        vision=vision,
        dtype="bfloat16" if asked.device == "cuda" else "float32",
    )
    model = LlamaModel(config, ParallelMesh(device=torch.device(asked.device)), seed=0)
    batches = [one.to(asked.device) for one in micro_batches(config, asked.capacity, asked.count, seed=1)]
    measured(model, batches[: asked.count // 8], 1)  # to be warm
    seconds = np.array(measured(model, batches, asked.repeats))
    numbers = [micro_batch_numbers(batch, config) for batch in batches]
    sizes = {name: np.array([one[name] for one in numbers]) for name in numbers[0]}
    half = np.arange(len(seconds)) % 2 == 0
    fit = fit_costs({name: values[half] for name, values in sizes.items()}, seconds[half], cost_model_of(config))
    others = {name: values[~half] for name, values in sizes.items()}, seconds[~half]
    shape = cost_model_of(config).micro_batch_costs(sizes)
    scaled = {"costs by shape": shape, "tokens": sizes["tokens"]}
    print(json.dumps(fit.model.by_feature(), indent=1))
    print(f"seconds of a micro-batch: {seconds.min():.4f} to {seconds.max():.4f}; {fit}")
    errors = {"fitted": np.abs(relative_errors(fit.model, *others))}
    for name, cost in scaled.items():
        scale = seconds[half].sum() / cost[half].sum()
        errors[name] = np.abs(cost[~half] * scale / seconds[~half] - 1)
    return errors


def main() -> None:
    torch.set_num_threads(1)
    for name, one in errors_of(arguments().parse_args()).items():
        within = (one < 0.08).mean()
        print(f"{name:>16}: mean {one.mean():6.2%}, 95 % below {np.quantile(one, 0.95):6.2%}, within 8 %: {within:.0%}")


if __name__ == "__main__":
    main()
