"""A real run with fixed batches, with batches by tokens, and with packed ones: seconds for an epoch, and to a loss.

The reference trainer on a processor; the data are the functions of Python's standard library, each a sample of its
natural length. The device is taken to have room for ``--capacity`` tokens. So a fixed batch has as many samples as fit
if all were of the longest length, and is padded to the longest of them; ``capacity`` takes as many as fit padded;
``best_fit`` packs rows. A step of each has about as many tokens as one of the others, and all learn at one rate: what
differs is how much is computed for nothing.

    python tools/bench/packed_training.py
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import statistics
import sys
import sysconfig
import tempfile
import time
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import fresh_process, machine, table, write_shards

VARIANTS = ("fixed", "capacity", "best_fit")
MODEL = {"hidden_size": 96, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 256}


def functions() -> Iterator[str]:
    """The source of each function and method of the standard library's public modules."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for name in sorted(name for name in sys.stdlib_module_names if not name.startswith("_")):
        path = folder / f"{name}.py"
        if not path.is_file():
            continue
        with tokenize.open(path) as stream:
            text = stream.read()
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                yield "".join(lines[node.lineno - 1 : node.end_lineno])


def make_data(folder: Path, arguments: argparse.Namespace) -> list[int]:
    """Shards with a measured column of lengths; returns these."""
    from energon_lite.cli.measure import command

    step = max(1, 6300 // arguments.samples)  # from all modules
    texts = list(itertools.islice(itertools.islice(functions(), 0, None, step), arguments.samples))
    samples = ({"txt": text.encode()} for text in texts)
    write_shards(folder / "library", samples, 1000, "TextSample", {"text": "txt"})
    program = "from energon_lite.trainer import MultimodalTaskEncoder\n"
    (folder / "measured_rows.py").write_text(
        f"{program}rows = MultimodalTaskEncoder(max_length={arguments.max_length})\n"
    )
    sys.path.insert(0, str(folder))
    options = ["--task-encoder", "measured_rows:rows", "--num-workers", "0", "--no-progress"]
    command.main([str(folder / "library"), *options], standalone_mode=False)
    return [min(arguments.max_length, len(text.encode()) + 1) for text in texts]


def batching(variant: str, capacity: int) -> dict[str, Any] | None:
    if variant == "capacity":
        return {"strategy": "capacity", "capacity": capacity, "unit": "padded_tokens"}
    return {"strategy": "best_fit", "capacity": capacity} if variant == "best_fit" else None


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """One variant: an epoch's steps by the trainer."""
    import torch

    from energon_lite.trainer import Trainer, config_from_dict

    torch.set_num_threads(1)
    total, rows = arguments.tokens, arguments.capacity // arguments.max_length
    micro_tokens = {"fixed": rows * total / arguments.samples, "capacity": arguments.filled, "best_fit": 0.99}
    each = micro_tokens[arguments.run]
    each = each if arguments.run == "fixed" else each * arguments.capacity
    micro_batches = max(1, round(arguments.step_tokens / each))
    steps = round(arguments.epochs * total / (each * micro_batches))
    config = config_from_dict(
        {
            "seed": 1,
            "output": tempfile.mkdtemp(dir=arguments.folder),
            "data": {
                "path": f"{arguments.folder}/library",
                "micro_batch_size": rows,
                "micro_batches_per_step": micro_batches,
                "max_length": arguments.max_length,
                "workers": 0,
                "batching": batching(arguments.run, arguments.capacity),
            },
            "model": MODEL,
            "optimizer": {"lr": 3e-3, "warmup": 5, "schedule": "constant"},
            "train": {"steps": steps, "deterministic": False},
        }
    )
    seconds, busy, tokens, losses = [], [], [], []
    with Trainer(config) as trainer:
        batches = iter(trainer.loader)
        for step in range(1, steps + 1):
            began, worked = time.perf_counter(), time.process_time()
            values = trainer.step(step, batches)
            seconds.append(time.perf_counter() - began)
            busy.append(time.process_time() - worked)
            tokens.append(values["tokens"])
            losses.append(values["loss"])
    return {"seconds": seconds, "busy": busy, "tokens": tokens, "losses": losses, "micro_batches": micro_batches}


def smoothed(found: dict[str, Any], width: int = 9) -> list[float]:
    """Medians of the last losses, so that one easy step is no success."""
    return [statistics.median(found["losses"][max(0, at - width + 1) : at + 1]) for at in range(len(found["losses"]))]


def greedy_fill(lengths: list[int], capacity: int) -> float:
    """Which share of a micro-batch of ``capacity`` is tokens, padding left out."""
    import numpy as np

    from energon_lite import Capacity, Greedy

    shuffled = np.random.default_rng(0).permutation(np.array(lengths))
    plan = Greedy(Capacity(capacity, "padded_tokens")).plan(shuffled, seed=0)
    return float(shuffled.sum() / (len(plan) * capacity))


def main() -> None:
    parser = argparse.ArgumentParser(description="Fixed, token-capacity and packed batches in a real run.")
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--max-length", type=int, default=1024, help="tokens of a sample at most; longer ones are cut")
    parser.add_argument("--capacity", type=int, default=8192, help="tokens that fit into the device at a time")
    parser.add_argument("--step-tokens", type=int, default=8192, help="tokens of an optimizer step, about")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--run", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--filled", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        print(json.dumps(run(arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        lengths = make_data(Path(folder), arguments)
        given = ["--folder", folder, "--tokens", str(sum(lengths))]
        given += ["--filled", str(greedy_fill(lengths, arguments.capacity)), "--samples", str(len(lengths))]
        found = {name: fresh_process(__file__, *sys.argv[1:], *given, "--run", name) for name in VARIANTS}
    mean, longest = statistics.mean(lengths), max(lengths)
    print(f"{machine()}\n{len(lengths)} samples, {sum(lengths):,} tokens, mean {mean:.0f}, longest {longest}")
    curves = {name: smoothed(one) for name, one in found.items()}
    target = max(curve[-1] for curve in curves.values())
    print(f"a loss that all reach: {target:.3f}\n")
    rows, base = [], found["fixed"]
    for name, one in found.items():
        epochs = sum(one["tokens"]) / sum(lengths)
        reached = next(at for at, loss in enumerate(curves[name]) if loss <= target) + 1
        to_loss, base_loss = sum(one["busy"][:reached]), None
        base_reached = next(at for at, loss in enumerate(curves["fixed"]) if loss <= target) + 1
        base_loss = sum(base["busy"][:base_reached])
        epoch, base_epoch = sum(one["busy"]) / epochs, sum(base["busy"]) / (sum(base["tokens"]) / sum(lengths))
        rows.append(
            (
                name,
                len(one["losses"]),
                f"{statistics.mean(one['tokens']):,.0f}",
                f"{sum(one['seconds']) / epochs:.1f}",
                f"{epoch:.1f}",
                f"{base_epoch / epoch:.2f}",
                f"{sum(one['tokens'][:reached]):,}",
                f"{to_loss:.1f}",
                f"{base_loss / to_loss:.2f}",
            )
        )
    header = ("batches", "steps", "tokens/step", "epoch, s", "CPU s", "faster", "tokens to the loss", "CPU s", "faster")
    print(table(header, rows))
    print("\nloss after so many tokens")
    marks = [sum(lengths) * arguments.epochs * part / 6 for part in range(1, 7)]
    by_tokens = []
    for name, one in found.items():
        seen = list(itertools.accumulate(one["tokens"]))
        places = [max(0, sum(count <= mark for count in seen) - 1) for mark in marks]
        by_tokens.append((name, *(f"{curves[name][place]:.3f}" for place in places)))
    print(table(("batches", *(f"{mark:,.0f}" for mark in marks)), by_tokens))


if __name__ == "__main__":
    main()
