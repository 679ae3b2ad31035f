"""Every layout of ranks makes the run that Hugging Face's Llama makes from the same weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from plain_llama import PlainRun, Rows, Weights
from rank_processes import RunRanks
from test_parity import BASE, OPTIMIZER, Layout, Run, make_steps, train_on

from energon_lite.trainer.models.config import ModelConfig, RopeScaling
from energon_lite.trainer.optimizer.plain_optimizer import learning_rate

CONFIGS = {
    "grouped heads, untied": dataclasses.replace(BASE, image_size=0, dtype="float32"),
    "Llama 3 scaling, tied": dataclasses.replace(
        BASE,
        image_size=0,
        dtype="float32",
        num_kv_heads=None,
        tie_embeddings=True,
        rope_scaling=RopeScaling(factor=4.0, low_frequency=0.1, high_frequency=1.5, original_length=6),
    ),
}


def packed_arguments(rows: Rows) -> dict[str, torch.Tensor]:
    """Documents as they want them: a mask that is added to scores, and positions that begin again."""
    if rows.documents is None:
        return {}
    length = rows.tokens.shape[1]
    same = rows.documents[:, :, None] == rows.documents[:, None, :]
    seen = same & torch.ones(length, length, dtype=torch.bool).tril()
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    # How many earlier tokens each sees, itself left out.
    return {"attention_mask": mask[:, None], "position_ids": seen.sum(-1) - 1}


def huggingface_run(config: ModelConfig, start: Weights, steps: list[list[Rows]]) -> PlainRun:
    """Their model, torch's optimizer and clipping; the loss over all tokens of a step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_frequency,
            "high_freq_factor": config.rope_scaling.high_frequency,
            "original_max_position_embeddings": config.rope_scaling.original_length,
        }
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.kv_heads,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            rope_parameters=rope,
            max_position_embeddings=64,
            attn_implementation="eager",
        )
    )
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in start.items():
            # Without the rows of padding, which no token and no label uses.
            theirs = named[name if name.startswith("lm_head") else f"model.{name}"]
            theirs.copy_(weight[: config.vocab_size] if theirs.shape[0] == config.vocab_size else weight)
    assert len(named) == len(start)
    matrices = [p for p in named.values() if p.dim() > 1]
    vectors = [p for p in named.values() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
    )
    losses, norms = [], []
    for number, micro_batches in enumerate(steps):
        tokens = sum(float(rows.loss_mask.sum()) for rows in micro_batches)
        total = 0.0
        for rows in micro_batches:
            logits = model(input_ids=rows.tokens, **packed_arguments(rows)).logits
            each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows.labels, reduction="none")
            loss = (each * rows.loss_mask).sum() / tokens
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number, len(steps), OPTIMIZER)
        optimizer.step()
        optimizer.zero_grad()
    return PlainRun(losses, norms, {name.removeprefix("model."): p.detach() for name, p in named.items()})


#: Micro-batches; in the second, one of two or four data-parallel ranks has no token that counts.
KINDS = {"texts": ("text",) * 4, "packed": ("packed", "text", "nothing", "packed")}
#: Settings that change no number.
EXTRAS: dict[str, dict[str, Any]] = {
    "texts": {},
    "packed": {"recompute": "full", "fuse_projections": True, "loss_chunk": 5, "attention": "varlen"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("grouped heads, untied", "packed"),
        ("Llama 3 scaling, tied", "texts"),
        pytest.param("grouped heads, untied", "texts", marks=pytest.mark.nightly),
        pytest.param("Llama 3 scaling, tied", "packed", marks=pytest.mark.nightly),
    ],
)
def test_layouts_make_their_run(run_ranks: RunRanks, name: str, kinds: str) -> None:
    config = dataclasses.replace(CONFIGS[name], **EXTRAS[kinds])
    none: dict[str, Any] = {"image_rows": torch.zeros(0, dtype=torch.int64), "image_starts": torch.zeros(0)}
    steps = [
        [dataclasses.replace(rows, image=rows.image[:0], **none) for rows in step] for step in make_steps(KINDS[kinds])
    ]
    layouts = [
        Layout(),
        Layout(tp=2, pp=2),
        Layout(dp=4),
        Layout(dp=2, tp=2, sp=True),
        Layout(dp=2, cp=2),
        Layout(pp=2, virtual=2),
        Layout(tp=2, pp=2, cp=2),
    ]
    theirs: PlainRun | None = None
    for layout in layouts:
        run: Run = run_ranks(layout.world, lambda rank, where=layout: train_on(config, steps, where))[0]
        if theirs is None:
            theirs = run_ranks(1, lambda rank, start=run.start: huggingface_run(config, start, steps))[0]
        torch.testing.assert_close(run.losses, theirs.losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(run.norms, theirs.norms, rtol=1e-5, atol=1e-5)
        assert run.end.keys() == theirs.weights.keys()
        for weight, mine in run.end.items():
            torch.testing.assert_close(
                mine[: len(theirs.weights[weight])], theirs.weights[weight], rtol=1e-5, atol=1e-5
            )
