"""Transformers' model, for one process and updated by torch's optimizer: what every layout must agree with.

Nothing here is shared with the trainer but names, the schedule, and the configuration that is converted. An image
prefix, which none of their models has, is written out.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from energon_lite.trainer.conversion.huggingface_folder import huggingface_name
from energon_lite.trainer.conversion.language_config import huggingface_config
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.interface import MultimodalBatch
from energon_lite.trainer.training.config import OptimizerConfig
from tests.trainer.conversion.small_models import in_double
from tests.trainer.parallel.plain_loop import PlainRun, plain_steps

Weights = dict[str, torch.Tensor]


class Rows(MultimodalBatch):
    """A micro-batch, of its fields in their order, without the names of its samples."""

    def __init__(self, *values: Any, **fields: Any):
        names = ("tokens", "labels", "loss_mask", "image", "image_rows", "image_starts", "documents")
        super().__init__(**{"__key__": [], "__restore_key__": ()} | fields | dict(zip(names, values, strict=False)))


def seen_by(rows: Rows, window: int | None) -> dict[str, torch.Tensor]:
    """Who sees whom, as they want it: a mask that is added to scores, and positions that begin again."""
    count, length = rows.tokens.shape
    documents = torch.zeros(count, length) if rows.documents is None else rows.documents
    seen = (documents[:, :, None] == documents[:, None, :]).tril()
    positions = seen.sum(-1) - 1  # how many earlier tokens each sees, itself left out
    if window is not None:
        seen &= torch.ones(length, length, dtype=torch.bool).triu(1 - window)
    lowest = torch.finfo(torch.float64).min
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, lowest)
    return {"attention_mask": mask[:, None], "position_ids": positions}


def image_tokens(weights: Weights, image: torch.Tensor, patch: int) -> torch.Tensor:
    """The vectors that stand for an image among those of tokens, one for each patch."""
    patches = F.unfold(image.double()[None] - 0.5, patch, stride=patch)[0].T
    return patches @ weights["vision.weight"].T + weights["vision.bias"] + weights["vision.position"]


def train(
    start: Weights,
    config: ModelConfig,
    steps: list[list[Rows]],
    settings: OptimizerConfig,
    frozen: tuple[str, ...] = (),
) -> PlainRun:
    """AdamW or SGD on the mean loss of all tokens of each step's micro-batches together, in float64."""
    from transformers import AutoConfig, AutoModelForCausalLM

    told = huggingface_config(dataclasses.replace(config, image_size=0), torch.float64)
    with in_double():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**told), attn_implementation="eager").double()
        theirs = dict(model.named_parameters())
        named = {name: w.clone().requires_grad_() for name, w in start.items() if name.startswith("vision.")}
        named |= {name: theirs.pop(huggingface_name(name)) for name in start.keys() - named.keys()}
        assert not theirs
        for name, p in named.items():
            # Without the rows of padding, which no token and no label uses.
            p.requires_grad_(name not in frozen).data.copy_(start[name][: len(p)])

        def loss(rows: Rows, tokens: float) -> torch.Tensor:
            embedded = model.get_input_embeddings()(rows.tokens).clone()
            for image, row, begin in zip(rows.image, rows.image_rows.tolist(), rows.image_starts.tolist(), strict=True):
                inside = image_tokens(named, image, config.patch_size)
                embedded[row, begin : begin + len(inside)] = inside
            logits = model(inputs_embeds=embedded, **seen_by(rows, config.sliding_window)).logits
            each = F.cross_entropy(logits.transpose(1, 2), rows.labels, reduction="none")
            return (each * rows.loss_mask).sum() / tokens

        made = []
        for step in steps:
            tokens = max(1.0, sum(float(rows.loss_mask.sum()) for rows in step))
            made.append([partial(loss, rows, tokens) for rows in step if len(rows.tokens)])
        losses, norms = plain_steps(named, made, settings)
    return PlainRun(losses, norms, {name: p.detach() for name, p in named.items()})
