"""Any layout of ranks makes the run that transformers' model and torch's optimizer make from the same weights.

Two hundred cases are drawn, each with another layout, kind of language model and way to compute; some at any time, all
of them at night.
"""

from __future__ import annotations

import dataclasses
import random
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from energon_lite.trainer.conversion.huggingface_folder import huggingface_name
from energon_lite.trainer.conversion.language_config import huggingface_config
from energon_lite.trainer.models.config import ModelConfig, RopeScaling
from energon_lite.trainer.optimizer.config import OptimizerConfig
from tests.testing import nightly_but
from tests.trainer.models.by_documents import BY_DOCUMENTS
from tests.trainer.parallel.plain_llama import Rows, Weights, image_tokens, tokens_of
from tests.trainer.parallel.plain_loop import PlainRun, plain_steps
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import BASE, OPTIMIZER, Layout, Run, make_steps, train_on

CASES = 200
#: Of these, what is run at any time: one of each kind, with all axes and images.
ALWAYS = (7, 8, 13)
#: Of losses and norms, relative to what is above one; and of weights.
TOLERANCE, OF_WEIGHTS = 2e-5, 1e-4
#: Kinds of models, by the class that transformers shall take.
KINDS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
    "MistralForCausalLM": {"sliding_window": 5},
}


class Case(NamedTuple):
    """A run: of which kind of model, on which layout, with what micro-batches in a step, how computed and updated."""

    kind: str
    layout: Layout
    config: ModelConfig
    rows: tuple[str, ...]
    settings: OptimizerConfig


def make_case(seed: int) -> Case:
    """One of the cases; neighbours are of different kinds."""
    draw = random.Random(seed)
    sizes = {"tp": 1, "cp": 1, "dp": 1, "pp": 1}
    for _ in range(draw.choice([1, 2, 2, 3, 3])):
        axis = draw.choice(sorted(sizes))
        sizes[axis] = min(sizes[axis] * 2, 4)
    if sizes["pp"] == 4 and draw.random() < 0.3:
        sizes["pp"] = 3
    layout = Layout(**sizes, sp=draw.random() < 0.5, virtual=draw.choice([1, 2]) if sizes["pp"] == 2 else 1)
    kind = list(KINDS)[seed % len(KINDS)]
    scaled = RopeScaling(factor=4.0, low_frequency=0.1, high_frequency=1.5, original_length=6)
    images = draw.random() < 0.4
    config = dataclasses.replace(
        BASE,
        dtype="float32",
        image_size=4 if images else 0,
        num_kv_heads=draw.choice([heads for heads in (1, 2, 4, 8) if heads % layout.tp == 0]),
        head_dim=draw.choice([None, 6]),
        rope_scaling=scaled if kind == "LlamaForCausalLM" and draw.random() < 0.5 else None,
        tie_embeddings=draw.random() < 0.5,
        recompute=draw.choice(["none", "selective", "full"]),
        attention=draw.choice(["sdpa", BY_DOCUMENTS]),
        loss_chunk=draw.choice([0, 5]),
        **KINDS[kind],
    )
    with_images = ("mixed", "several", "packed image")
    choices = ("text", "packed", "nothing", "empty", *(with_images if images else ()))
    rows = ("several" if images else "packed", *draw.choices(choices, k=draw.randint(1, 5)))
    bucket_size = draw.choice([1, 400, 1500, None])
    settings = dataclasses.replace(OPTIMIZER, bucket_size=bucket_size, reduce=draw.choice(["last", "every"]))
    return Case(kind, layout, config, rows, settings)


def seen_by(rows: Rows, window: int | None) -> dict[str, torch.Tensor]:
    """Who sees whom, as they want it: a mask that is added to scores, and positions that begin again."""
    count, length = rows.tokens.shape
    documents = torch.zeros(count, length) if rows.documents is None else rows.documents
    seen = (documents[:, :, None] == documents[:, None, :]).tril()
    positions = seen.sum(-1) - 1  # how many earlier tokens each sees, itself left out
    if window is not None:
        seen &= torch.ones(length, length, dtype=torch.bool).triu(1 - window)
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return {"attention_mask": mask[:, None], "position_ids": positions}


def huggingface_run(case: Case, start: Weights, steps: list[list[Rows]]) -> PlainRun:
    """Their model, torch's optimizer and clipping; the loss over all tokens of a step."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = case.config
    values = huggingface_config(dataclasses.replace(config, image_size=0), torch.float32)
    theirs = AutoConfig.for_model(**values)
    model = AutoModelForCausalLM.from_config(theirs, attn_implementation="eager")
    assert type(model).__name__ == case.kind
    prefix = {name: torch.nn.Parameter(w.clone()) for name, w in start.items() if name.startswith("vision.")}
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name in start.keys() - prefix.keys():
            # Without the rows of padding, which no token and no label uses.
            parameter = named[huggingface_name(name)]
            parameter.copy_(start[name][: len(parameter)])
    assert len(named) + len(prefix) == len(start)

    def loss(rows: Rows, tokens: float) -> torch.Tensor:
        embedded = model.get_input_embeddings()(rows.tokens).clone()
        for image, row, begin in zip(rows.image, rows.image_rows.tolist(), rows.image_starts.tolist(), strict=True):
            inside = image_tokens(prefix, image, config.patch_size)
            embedded[row, begin : begin + len(inside)] = inside
        logits = model(inputs_embeds=embedded, **seen_by(rows, config.sliding_window)).logits
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows.labels, reduction="none")
        return (each * rows.loss_mask).sum() / tokens

    made = [[partial(loss, rows, tokens_of(step)) for rows in step if len(rows.tokens)] for step in steps]
    losses, norms = plain_steps(named | prefix, made, OPTIMIZER)
    found = {name.removeprefix("model."): p.detach() for name, p in (named | prefix).items()}
    return PlainRun(losses, norms, found)


def without_images(rows: Rows) -> Rows:
    none = rows.image_rows[:0]
    return dataclasses.replace(rows, image=rows.image[:0], image_rows=none, image_starts=none)


@pytest.mark.slow
@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("seed", nightly_but(ALWAYS, range(CASES)))
def test_a_layout_makes_their_run(run_ranks: RunRanks, seed: int) -> None:
    case = make_case(seed)
    steps = make_steps(case.rows, seed, steps=3 if seed in ALWAYS else 8)
    if not case.config.image_size:
        steps = [[without_images(rows) for rows in step] for step in steps]

    def train(rank: int) -> Run:
        return train_on(case.config, steps, case.layout, settings=case.settings)

    ours: Run = run_ranks(case.layout.world, train)[0]
    theirs: PlainRun = run_ranks(1, lambda rank: huggingface_run(case, ours.start, steps))[0]
    assert ours.weights.keys() == theirs.weights.keys()
    pairs = [*zip(ours.losses, theirs.losses, strict=True), *zip(ours.norms, theirs.norms, strict=True)]
    numbers = max(abs(mine - other) / max(1.0, abs(other)) for mine, other in pairs)
    of_weights = max((ours.weights[n][: len(w)] - w).abs().max().item() for n, w in theirs.weights.items())
    # They have moved: by more than what may differ.
    assert all((w - ours.start[name]).abs().max() > 10 * OF_WEIGHTS for name, w in ours.weights.items())
    assert numbers < TOLERANCE and of_weights < OF_WEIGHTS, f"{case}: {numbers:.1e} and {of_weights:.1e}"
