"""A training step of a Llama, ours and Hugging Face's: tokens per second, share of the matrix rate, and memory.

Ours is what the trainer runs: ``train_step`` with the model, the overlapped optimizer and the settings of a run's
configuration (``--set model.loss_chunk=4096`` and the like). Hugging Face's is its Llama with the same work around it:
bfloat16 with float32 masters, fused AdamW, clipping, the loss of all tokens. Each is a process of its own, so that
memory is its own.

    python tools/bench/train_step.py --preset 1.1B --batch 8 --length 2048     # a GPU
    python tools/bench/train_step.py --tiny                                    # anywhere: that the script works

The share counts 6 N + 6 L H S operations a token (N weights of matrices; a causal row needs half of its attention), of
the rate that the device reaches in one large product of bfloat16 matrices, measured here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import fresh_process, machine, table

from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.training import (
    LlamaModel,
    ModelConfig,
    MultimodalBatch,
    make_optimizer,
    model_preset,
    train_step,
)
from energon_lite.trainer.training.throughput import flops_per_token

#: The trainer's settings that make it fast.
OURS = {"compile": True, "fuse_projections": True, "loss_chunk": 4096}
VARIANTS = ("ours", "ours-plain", "hf", "hf-compiled")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def shape(arguments: argparse.Namespace, **more: Any) -> ModelConfig:
    given = {key: json.loads(value) for key, _, value in (text.partition("=") for text in arguments.set)}
    return model_preset(arguments.preset, dtype="bfloat16", **more, **given)


def make_batch(config: ModelConfig, arguments: argparse.Namespace) -> MultimodalBatch:
    """Random tokens: rows of one length, all of which count."""
    generator = torch.Generator().manual_seed(0)
    sizes = (arguments.batch, arguments.length + 1)
    tokens = torch.randint(0, config.vocab_size, sizes, generator=generator).to(device())
    return MultimodalBatch(
        __key__=[""] * arguments.batch,
        __restore_key__=(),
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        loss_mask=torch.ones(arguments.batch, arguments.length, device=device()),
        image=torch.zeros(0, 3, 0, 0, device=device()),
        image_rows=(none := torch.zeros(0, dtype=torch.int64, device=device())),
        image_starts=none,
    )


def ours(arguments: argparse.Namespace, *, fast: bool) -> Callable[[], float]:
    """The trainer's step."""
    config = shape(arguments, **(OURS if fast else {}))
    mesh = build_mesh()
    model = LlamaModel(config, mesh, seed=0)
    optimizer = make_optimizer(model, mesh, OptimizerConfig(clip=1.0, grad_dtype=arguments.grad_dtype))
    batches = [make_batch(config, arguments)] * arguments.micro_batches
    return lambda: train_step(model, optimizer, batches, mesh, lr=1e-4).loss


def hugging_face(arguments: argparse.Namespace, *, compiled: bool) -> Callable[[], float]:
    """Their model; masters, clipping and AdamW by hand, as mixed precision means it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = shape(arguments)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=arguments.length,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
            use_cache=False,
        )
    ).to(device(), torch.bfloat16)
    parameters = list(model.parameters())
    masters = [p.detach().float() for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    called: Any = torch.compile(model) if compiled else model
    batch = make_batch(config, arguments)
    tokens = torch.cat([batch.tokens, batch.labels[:, -1:]], dim=1)

    def step() -> float:
        total = 0.0
        for _ in range(arguments.micro_batches):
            # Their loss moves labels by itself: one token fewer counts, of thousands.
            loss = called(input_ids=batch.tokens, labels=tokens[:, :-1]).loss / arguments.micro_batches
            loss.backward()
            total += loss.item()
        for master, p in zip(masters, parameters, strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
            p.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        optimizer.step()
        for master in masters:
            master.grad = None
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        return total

    return step


def synchronize() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One variant, in this process."""
    if device().type == "cpu":
        torch.set_num_threads(1)
    name = arguments.run
    made = ours(arguments, fast=name == "ours") if name.startswith("ours") else None
    step = made or hugging_face(arguments, compiled=name == "hf-compiled")
    losses = [step() for _ in range(arguments.warm_up)]
    seconds = []
    for _ in range(arguments.steps):
        synchronize()
        began = time.perf_counter()
        losses.append(step())
        synchronize()
        seconds.append(time.perf_counter() - began)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device().type == "cuda" else float("nan")
    return {"seconds": seconds, "memory": memory, "first": losses[0], "last": losses[-1]}


def matrix_rate(tiny: bool) -> float:
    """FLOP/s of one large product of bfloat16 matrices, the best of several sizes' medians."""
    best = 0.0
    for size in (256, 512) if tiny else (4096, 8192, 16384):
        a, b = (torch.randn(size, size, device=device(), dtype=torch.bfloat16) for _ in range(2))
        seconds = []
        for _ in range(12):
            synchronize()
            began = time.perf_counter()
            torch.mm(a, b)
            synchronize()
            seconds.append(time.perf_counter() - began)
        best = max(best, 2 * size**3 / statistics.median(seconds[2:]))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="A training step, ours and Hugging Face's.")
    parser.add_argument("--preset", default="1.1B")
    parser.add_argument("--batch", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--grad-dtype", default="parameter", help="of sums of gradients: parameter or float32")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="a key of the model section")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few steps, for a processor")
    parser.add_argument("--run", choices=[*VARIANTS, "matrix"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.preset, arguments.batch, arguments.length, arguments.steps, arguments.warm_up = "tiny", 2, 64, 4, 2
    if arguments.run is not None:
        print(json.dumps(matrix_rate(arguments.tiny) if arguments.run == "matrix" else measure(arguments)))
        return
    given = [text for text in sys.argv[1:] if not text.startswith("--variants")]
    rate = fresh_process(__file__, *given, "--run", "matrix")
    config = shape(arguments)
    tokens = arguments.batch * arguments.length * arguments.micro_batches
    needed = flops_per_token(config, arguments.length) * tokens
    print(f"{machine()}; {torch.cuda.get_device_name() if device().type == 'cuda' else 'no GPU'}")
    print(f"{arguments.preset}: {dataclasses.asdict(config)}")
    print(f"{tokens:,} tokens a step, rows of {arguments.length}; matrix rate {rate / 1e12:.3g} TFLOP/s\n")
    rows = []
    for variant in arguments.variants.split(","):
        found = fresh_process(__file__, *given, "--run", variant)
        middle = statistics.median(found["seconds"])
        rows.append(
            (
                variant,
                f"{tokens / middle:,.0f}",
                f"{middle * 1e3:.1f} ({min(found['seconds']) * 1e3:.1f}-{max(found['seconds']) * 1e3:.1f})",
                f"{needed / middle / rate:.1%}",
                f"{found['memory']:.1f}",
                f"{found['first']:.3f} -> {found['last']:.3f}",
            )
        )
    print(table(("step", "tokens/s", "ms", "of the rate", "GiB", "loss"), rows))


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    main()
