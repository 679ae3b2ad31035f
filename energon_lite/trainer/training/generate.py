"""Text continuation and image captioning: token by token, with a cache of keys and values."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from energon_lite.errors import UsageError, require
from energon_lite.trainer.checkpointing.checkpoint import load_checkpoint, read_state
from energon_lite.trainer.models.llama import LlamaModel, Stream
from energon_lite.trainer.models.sequence import KeyValueCache, local_length
from energon_lite.trainer.parallel.collectives import gather_parallel
from energon_lite.trainer.parallel.mesh import ParallelMesh, build_mesh
from energon_lite.trainer.tokenizing.tokenizer import ByteTokenizer, Tokenizer, make_tokenizer
from energon_lite.trainer.training.config import model_config_of
from energon_lite.trainer.training.pipeline import Wire


def load_model(checkpoint: str | os.PathLike[str], mesh: ParallelMesh | None = None) -> LlamaModel:
    """Load the model of a checkpoint, saved in any layout.

    Args:
        checkpoint: a checkpoint's folder; :func:`latest_checkpoint` returns the newest of a run.
        mesh: the ranks to shard it over; None for this process alone (or, under torchrun, a replica on each rank).

    Raises:
        StateError: not a checkpoint of this trainer.
    """
    mesh = build_mesh() if mesh is None else mesh
    model = LlamaModel(model_config_of(read_state(checkpoint)["config"]), mesh, drawn=())
    load_checkpoint(checkpoint, model, mesh)
    return model


def load_tokenizer(checkpoint: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer of a checkpoint's run: the bytes of UTF-8, or that of ``data.tokenizer``.

    Raises:
        StateError: not a checkpoint of this trainer.
        UsageError: the tokenizer file of that run no longer exists.
    """
    config = read_state(checkpoint)["config"]
    return make_tokenizer(config["data"]["tokenizer"], model_config_of(config).vocab_size)


@dataclass(frozen=True)
class Sampling:
    """Rule by which the next token is chosen from the model's logits.

    Args:
        temperature: divisor of the logits; 0 for the likeliest token.
        top_k: number of likeliest tokens to choose among; 0 for all.
        top_p: choose among the likeliest tokens that make up this probability together (nucleus sampling, Holtzman et
            al., arXiv:1904.09751).
        seed: seed of the random choice.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.temperature >= 0, "temperature is negative", "temperature", "0 takes the likeliest token")
        require(self.top_k >= 0, "top_k is negative", "top_k", "0 leaves all tokens in")
        require(0 < self.top_p <= 1, f"top_p={self.top_p} is not a share", "top_p", "e.g. 0.9")


@torch.no_grad()
def generate(
    model: LlamaModel,
    prompts: Sequence[Sequence[int]],
    *images: Any,
    max_new_tokens: int = 40,
    eos: int | None = None,
    sampling: Sampling | None = None,
) -> list[list[int]]:
    """Continue rows of tokens. Every rank of a replica must call it with equal rows; all return the answer.

    Keys and values are cached (:class:`KeyValueCache`), so a token costs one position, in a pipeline one pass through
    all stages. Prompts may have any lengths: shorter ones are padded on the left with a document of its own, which no
    token attends to.

    Args:
        model: sharded over any ``tp`` and ``pp``, its rows whole (``cp=1``).
        prompts: rows of at least one token each.
        images: as in :meth:`LlamaModel.embed`, ``image_starts`` counted within the prompt.
        max_new_tokens: the most tokens of an answer.
        eos: the token that ends a row; it is the last of the answer.
        sampling: None for the likeliest token each time.

    Returns:
        For each prompt the tokens that follow it.

    Raises:
        UsageError: a prompt is empty, or the rows of the model are sharded over ranks.

    Example:
        >>> generate(model, [[1, 5, 9], [1, 7]], max_new_tokens=2)
        [[4, 4], [8, 2]]
    """
    if model.mesh.cp > 1:
        raise UsageError("rows are cut over ranks", fix="load the model with cp=1")
    if not all(prompts):
        raise UsageError("a prompt has no token", fix="begin it with the tokenizer's first token")
    if not prompts or max_new_tokens < 1:
        return [[] for _ in prompts]
    device, longest = model.mesh.device, max(map(len, prompts))
    before = [longest - len(prompt) for prompt in prompts]
    padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    tokens = torch.tensor(padded, dtype=torch.int64, device=device)
    if images:  # shift by the padding on the left
        image, rows, starts, *more = images
        images = image, rows, starts + torch.tensor(before, device=device)[rows], *more
    sampling = sampling or Sampling()
    # A step under sequence parallelism is padded to a multiple of tp.
    decoder = _Decoder(model, KeyValueCache(longest + max_new_tokens + model.mesh.tp), before)
    random = torch.Generator(device).manual_seed(sampling.seed)
    ended, made = torch.zeros(len(prompts), dtype=torch.bool, device=device), []
    for _ in range(max_new_tokens):
        following = decoder.next_token(tokens, images, partial(choose, sampling=sampling, random=random))
        made.append(following)
        ended |= following == (-1 if eos is None else eos)
        if bool(ended.all()):
            break
        tokens, images = following[:, None], ()
    answers = torch.stack(made, dim=1).tolist()
    return [answer[: answer.index(eos) + 1] if eos in answer else answer for answer in answers]


def choose(logits: torch.Tensor, sampling: Sampling, random: torch.Generator) -> torch.Tensor:
    """Choose the next token of each row, int64 ``[rows]``, by its logits ``[rows, vocabulary]``."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    likely, order = (logits.float() / sampling.temperature).softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    # A token stays while the tokens before it make up less than top_p; so the likeliest always stays.
    likely[likely.cumsum(dim=-1) - likely >= sampling.top_p] = 0
    if sampling.top_k:
        likely[:, sampling.top_k :] = 0
    return order.gather(-1, torch.multinomial(likely, 1, generator=random))[:, 0]


class _Decoder:
    """Runs successive positions through all stages, with one cache."""

    def __init__(self, model: LlamaModel, cache: KeyValueCache, before: list[int]):
        self.model = model
        self.cache = cache
        self.before = before
        self.wire = Wire(model.mesh)

    def next_token(
        self, tokens: torch.Tensor, images: tuple[Any, ...], choice: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return ``choice(logits)`` for the logits behind ``tokens`` ``[rows, n]``: int64 ``[rows]``, on all ranks."""
        model, mesh = self.model, self.model.mesh
        following = tokens.new_zeros(len(tokens))
        # Compiled blocks would be recompiled for each length.
        with torch.compiler.set_stance("force_eager"):
            for chunk in range(mesh.virtual):
                made = model.blocks(chunk, self._stream(chunk, tokens, images), self.cache)
                if mesh.ends(chunk):
                    following = choice(self._last_logits(made, tokens.shape[1]))
                else:
                    self.wire.send(made.hidden, 1)
        self.wire.finish()
        self.cache.length += tokens.shape[1]
        if (group := mesh.group("pp")) is not None:
            dist.broadcast(following, mesh.stage_rank(-1), group=group)
        return following

    def _stream(self, chunk: int, tokens: torch.Tensor, images: tuple[Any, ...]) -> Stream:
        """Return the input of a chunk of layers: the embedding, or the output of the previous stage."""
        model, mesh = self.model, self.model.mesh
        (rows, new), start, part = tokens.shape, self.cache.length, local_length(tokens.shape[1], mesh)
        if mesh.starts(chunk):
            hidden = model.embed(tokens, *images).hidden
        else:
            hidden = self.wire.receive((rows, part, model.config.hidden_size), model.config.torch_dtype, -1)
        # Padding before the row, the row, and behind it cache slots not yet filled.
        return Stream(hidden, [[n, start + new - n] for n in self.before] if any(self.before) else None)

    def _last_logits(self, made: Stream, new: int) -> torch.Tensor:
        """Return the logits behind the last token, ``[rows, vocab_size]``."""
        mesh = self.model.mesh
        if not mesh.sequence_cut:
            made, new = Stream(made.hidden[:, new - 1 : new]), 1
        logits = gather_parallel(self.model.head(made)[:, new - 1], mesh.group("tp"))
        return logits[:, : self.model.config.vocab_size]


def generate_text(
    model: LlamaModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 40,
    sampling: Sampling | None = None,
) -> list[str]:
    """Continue texts; see :func:`generate`.

    Args:
        model: a trained model (:func:`load_model`).
        tokenizer: the one it was trained with (:func:`load_tokenizer`).
        prompts: texts; if the tokenizer has a begin token, it is put before each.
        max_new_tokens: the most tokens of an answer.
        sampling: None for the likeliest token each time.

    Example:
        >>> generate_text(model, tokenizer, ["To be, or not to be"], sampling=Sampling(temperature=0.8, top_p=0.95))
        [', that is the question']
    """
    first = [] if tokenizer.bos is None else [tokenizer.bos]
    rows = [[*first, *tokenizer.encode_plain(prompt)] for prompt in prompts]
    answers = generate(model, rows, max_new_tokens=max_new_tokens, eos=tokenizer.eos, sampling=sampling)
    return [tokenizer.decode(answer) for answer in answers]


def generate_captions(
    model: LlamaModel, images: torch.Tensor, *, tokenizer: Tokenizer | None = None, max_new_tokens: int = 40
) -> list[str]:
    """Generate greedy captions of a batch of images.

    Args:
        model: a trained model with an image prefix.
        images: float ``[n, 3, image_size, image_size]`` in [0, 1].
        tokenizer: the one it was trained with (:func:`load_tokenizer`); None for the bytes of UTF-8.
        max_new_tokens: the most tokens of a caption.

    Raises:
        UsageError: the tokenizer has no begin token.

    Example:
        >>> generate_captions(load_model(latest_checkpoint("output/checkpoints")), images)
        ['a handwritten seven', 'a handwritten three']
    """
    tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
    if tokenizer.bos is None:
        raise UsageError("the tokenizer has no token that begins a text", fix="name bos_token in its folder's settings")
    rows = torch.arange(len(images), device=model.mesh.device)
    # Placeholder tokens, of any value, hold the image's positions before the text.
    prompts = [[tokenizer.bos] * (model.config.prefix_length + 1)] * len(images)
    where = images.to(model.mesh.device), rows, torch.zeros_like(rows)
    answers = generate(model, prompts, *where, max_new_tokens=max_new_tokens, eos=tokenizer.eos)
    return [tokenizer.decode(answer) for answer in answers]
