"""Reading images aloud: the likeliest next token, one after another."""

from __future__ import annotations

import os

import torch

from energon_lite import UsageError
from energon_lite.trainer.checkpointing.checkpoint import load_checkpoint, read_state
from energon_lite.trainer.data.tokenizer import ByteTokenizer, Tokenizer, make_tokenizer
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.parallel.mesh import ParallelMesh, build_mesh
from energon_lite.trainer.training.config_file import model_config_of


def load_model(checkpoint: str | os.PathLike[str], mesh: ParallelMesh | None = None) -> LlamaModel:
    """The model of a checkpoint, whatever layout saved it.

    Args:
        checkpoint: a checkpoint's folder; :func:`latest_checkpoint` finds the newest of a run.
        mesh: the ranks to cut it over; None for this process alone (or, under torchrun, a replica on each rank).

    Raises:
        StateError: not a checkpoint of this trainer.
    """
    mesh = build_mesh() if mesh is None else mesh
    model = LlamaModel(model_config_of(read_state(checkpoint)["config"]), mesh)
    load_checkpoint(checkpoint, model, mesh)
    return model


def load_tokenizer(checkpoint: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that the run of a checkpoint had: the bytes of UTF-8, or that of ``data.tokenizer``.

    Raises:
        StateError: not a checkpoint of this trainer.
        UsageError: the file that the run had is not there any more.
    """
    config = read_state(checkpoint)["config"]
    return make_tokenizer(config["data"]["tokenizer"], model_config_of(config).vocab_size)


@torch.no_grad()
def generate_captions(
    model: LlamaModel, images: torch.Tensor, *, tokenizer: Tokenizer | None = None, max_new_tokens: int = 40
) -> list[str]:
    """Greedy captions of a batch of images.

    The whole row is computed anew for each token; there is no cache of keys and values.

    Args:
        model: a trained model with an image prefix.
        images: float ``[n, 3, image_size, image_size]`` in [0, 1].
        tokenizer: the one it was trained with (:func:`load_tokenizer`); None for the bytes of UTF-8.
        max_new_tokens: where a caption is cut that has not ended by itself.

    Raises:
        UsageError: the tokenizer has no token to begin with.

    Example:
        >>> generate_captions(load_model(latest_checkpoint("output/checkpoints")), images)
        ['a handwritten seven', 'a handwritten three']
    """
    tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
    if tokenizer.bos is None:
        raise UsageError("the tokenizer has no token that begins a text", fix="name bos_token in its folder's settings")
    device = model.mesh.device
    images, rows = images.to(device), torch.arange(len(images), device=device)
    prefix = model.config.prefix_length
    # Before the text, tokens keep the image's place; any do.
    tokens = torch.full((len(images), prefix + 1), tokenizer.bos, dtype=torch.int64, device=device)
    ended = torch.zeros(len(images), dtype=torch.bool, device=device)
    for _ in range(max_new_tokens):
        following = model.all_logits(tokens, images, rows, torch.zeros_like(rows))[:, -1].argmax(dim=-1)
        tokens = torch.cat([tokens, following[:, None]], dim=1)
        ended |= following == tokenizer.eos
        if bool(ended.all()):
            break
    return [tokenizer.decode(row) for row in tokens[:, prefix:].tolist()]
