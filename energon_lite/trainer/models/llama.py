"""A Llama decoder (Touvron et al., arXiv:2302.13971) with an optional image prefix, sharded over a mesh.

Modules and parameters have the names of Hugging Face's Llama (without its leading ``model.``).

Heads are sharded over the tensor-parallel ranks. With context parallelism, each rank has the queries of its own
positions and gathers all keys and values (as in the training of Llama 3, arXiv:2407.21783, section 3.3.2). With grouped
heads these are small compared to the rest, and gathering works with any mask, unlike passing them around a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from energon_lite.errors import UsageError
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.execution import CompiledBlocks, computed_again, residual
from energon_lite.trainer.models.interface import LossSums, MultimodalBatch, sizes_of_images
from energon_lite.trainer.models.named_layers import Lengths, adopt_norm, choose_attention, make_norm, register_norm
from energon_lite.trainer.models.sequence import (
    KeyValueCache,
    Rotation,
    SequencePart,
    gather_positions,
    lengths_of_rows,
    own_positions,
    sequence_part,
)
from energon_lite.trainer.models.tensor_parallel import (
    ColumnParallelLinear,
    OutputLayer,
    Projections,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from energon_lite.trainer.models.vision import Exchange, Projector, encode_images, make_vision, place_tokens
from energon_lite.trainer.parallel.collectives import gather_parallel, split_sequence
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import indivisible, initialize_parameters
from energon_lite.trainer.parallel.rank_grid import layers_of_stages


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate ``x`` ``[..., length, width]`` by its positions.

    Feature i is paired with feature i + width/2, as in Hugging Face's Llama, whose weights therefore fit unchanged.
    """
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def head_norm(config: ModelConfig, mesh: ParallelMesh) -> nn.Module:
    """Make RMSNorm of each head of queries or keys; all heads share one weight (Henry et al., arXiv:2010.04245).

    Each tensor-parallel rank norms its own heads, so each has a partial sum of the weight's gradient.
    """
    return adopt_norm(nn.RMSNorm(config.head_width, config.norm_eps), config, mesh, sum_over=("tp",))


class Attention(Projections):
    """Causal self-attention of ``num_heads`` query and ``kv_heads`` key and value heads.

    A rank holds ``1/tp`` of the heads of both kinds; a query head and the key head it uses are on the same rank.

    Args:
        config: the model's shape.
        mesh: the ranks.
        output_std: standard deviation of the initial output weights.

    Raises:
        TopologyError: ``tp`` does not divide the numbers of heads.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, *, output_std: float):
        super().__init__(mesh)
        hidden, width = config.hidden_size, config.head_width
        for kind, heads in (("query", config.num_heads), ("key", config.kv_heads)):
            if heads % mesh.tp:
                raise indivisible(f"a layer of {heads} {kind} heads", heads, mesh)
        self.head_width = width
        queries = config.num_heads * width
        keys = config.kv_heads * width
        make = partial(
            ColumnParallelLinear, mesh=mesh, bias=config.qkv_bias, std=config.init_std, dtype=config.torch_dtype
        )
        self.q_proj, self.k_proj, self.v_proj = (make(hidden, features) for features in (queries, keys, keys))
        self.o_proj = RowParallelLinear(queries, hidden, mesh, std=output_std, dtype=config.torch_dtype)
        self.q_norm = head_norm(config, mesh) if config.qk_norm else None
        self.k_norm = head_norm(config, mesh) if config.qk_norm else None

    def layers(self) -> Sequence[ColumnParallelLinear]:
        return self.q_proj, self.k_proj, self.v_proj

    def forward(self, x: torch.Tensor, part: SequencePart) -> torch.Tensor:
        """Attend within the rows: ``[rows, positions, hidden]`` -> the same shape."""
        q, k, v = (self._heads(features) for features in self.project(x))
        q, k = q if self.q_norm is None else self.q_norm(q), k if self.k_norm is None else self.k_norm(k)
        q, k = rotate(q, part.rotation), rotate(k, part.rotation)
        if part.mesh.cp > 1 or part.cache is not None:
            # Keys and values are concatenated, so that one collective gathers them.
            both = gather_positions(torch.cat([k, v], dim=-1), part.mesh)
            k, v = (both if part.cache is None else part.cache.extend(self, both)).chunk(2, dim=-1)
        return self.o_proj(self._mix(q, k, v, part).transpose(1, 2).flatten(2))

    def _mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: SequencePart) -> torch.Tensor:
        """Attend from each run of queries to the keys up to its end."""
        if len(part.runs) == 1:  # it has all positions; a split or a slice would copy the gradient
            return part.attention(q, k, v, part.runs[0])
        pieces = zip(q.split([run.length for run in part.runs], dim=2), part.runs, strict=True)
        ends = [(queries, run.start + run.length, run) for queries, run in pieces]
        return torch.cat([part.attention(queries, k[:, :, :end], v[:, :, :end], run) for queries, end, run in ends], 2)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """Split heads: ``[rows, length, heads * width]`` -> ``[rows, heads, length, width]``."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


@dataclass(frozen=True)
class Stream:
    """Data that one chunk of layers passes to the next.

    Args:
        hidden: ``[rows, positions, hidden]``, this rank's part of the rows.
        lengths: tokens of the documents of each row, without padding; None if each row is one document.
    """

    hidden: torch.Tensor
    lengths: Lengths | None = None


def rms_norm(config: ModelConfig, mesh: ParallelMesh) -> nn.Module:
    """Make RMSNorm, ``x / rms(x) * weight`` (Zhang and Sennrich, arXiv:1910.07467), whole on every rank."""
    return adopt_norm(nn.RMSNorm(config.hidden_size, config.norm_eps), config, mesh)


register_norm("rms_norm", rms_norm)


class FeedForward(Projections):
    """Feed-forward layer ``down(silu(gate(x)) * up(x))`` (SwiGLU; Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, *, output_std: float):
        super().__init__(mesh)
        hidden, inner, dtype = config.hidden_size, config.ffn_size, config.torch_dtype
        make = partial(ColumnParallelLinear, hidden, inner, mesh, std=config.init_std, dtype=dtype)
        self.gate_proj, self.up_proj = make(), make()
        self.down_proj = RowParallelLinear(inner, hidden, mesh, std=output_std, dtype=dtype)

    def layers(self) -> Sequence[ColumnParallelLinear]:
        return self.gate_proj, self.up_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.project(x)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """One layer: attention and feed-forward, each on a normed input and added to the residual stream."""

    def __init__(self, config: ModelConfig, mesh: ParallelMesh):
        super().__init__()
        # Each block adds twice to the residual stream; smaller output weights keep its size (GPT-2's rule).
        output_std = config.init_std / (2 * config.num_layers) ** 0.5
        self.input_layernorm = make_norm(config, mesh)
        self.self_attn = Attention(config, mesh, output_std=output_std)
        self.post_attention_layernorm = make_norm(config, mesh)
        self.mlp = FeedForward(config, mesh, output_std=output_std)
        self.selective = config.recompute == "selective"

    def forward(self, x: torch.Tensor, part: SequencePart) -> torch.Tensor:
        halves = (self.input_layernorm, self.self_attn, part), (self.post_attention_layernorm, self.mlp)
        return residual(x, *halves, selective=self.selective)


class LlamaModel(nn.Module):
    """This rank's part of the decoder. Its initial weights depend on (config, seed) only, not on the layout.

    A pipeline stage has one or more chunks of layers. The first chunk of the first stage begins with the embedding, the
    last of the last ends with the loss; a tied embedding is on both stages.

    Args:
        config: the model's shape.
        mesh: the ranks it is sharded over.
        seed: seed of the initial weights.
        drawn: name patterns of the weights to initialize; the others are zeros, to be loaded.

    Raises:
        TopologyError: a dimension is not divisible by ``mesh.tp``, or there are fewer layers than stages.

    Example:
        >>> model = LlamaModel(ModelConfig(hidden_size=64, num_layers=2), build_mesh())
        >>> model.loss_sum(batch).backward()
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, *, seed: int = 0, drawn: Sequence[str] = ("*",)):
        super().__init__()
        self.config = config
        self.mesh = mesh
        choose_attention(config, mesh.device)  # an unknown name is an error now
        self.chunks = layers_of_stages(config.num_layers, mesh.pp, mesh.virtual)[mesh.rank("pp")]
        first, last, tied = mesh.is_first_stage, mesh.is_last_stage, config.tie_embeddings
        self.embed_tokens: VocabParallelEmbedding | None = None
        if first or (last and tied):
            shared = ("ends",) if tied else ()
            drawing: dict[str, Any] = {"std": config.init_std, "dtype": config.torch_dtype, "sum_over": shared}
            self.embed_tokens = VocabParallelEmbedding(config.padded_vocab_size, config.hidden_size, mesh, **drawing)
        self.vision = make_vision(config, mesh) if first else None
        self.projector = Projector(config, mesh) if config.vision is not None and first else None
        # Layers are named by their number in the whole model, so names are equal on all pipeline stages.
        numbers = [number for chunk in self.chunks for number in chunk]
        self.layers = nn.ModuleDict({str(number): Block(config, mesh) for number in numbers})
        self.norm = make_norm(config, mesh) if last else None
        self.lm_head = OutputLayer(config, mesh) if last else None
        if tied and self.lm_head is not None and self.embed_tokens is not None:
            self.lm_head.weight = self.embed_tokens.weight
        #: Encoder that replaces this rank's during a step (``ImageExchange``).
        self.exchange: Exchange | None = None
        initialize_parameters(self, seed=seed, mesh=mesh, drawn=drawn)
        self.compiled = CompiledBlocks(self.layers.values(), budget=config.recompute_budget) if config.compile else None

    def parameters_of_chunk(self, chunk: int) -> list[nn.Parameter]:
        """Return the parameters that get gradients in the backward pass of a chunk of this stage."""
        modules: list[nn.Module | None] = [self.layers[str(number)] for number in self.chunks[chunk]]
        if self.mesh.starts(chunk):
            modules += [self.embed_tokens, self.vision, self.projector]
        if self.mesh.ends(chunk):
            modules += [self.norm, self.lm_head]
        return [p for module in modules if module is not None for p in module.parameters()]

    def embed(
        self,
        tokens: torch.Tensor,
        image: torch.Tensor | None = None,
        image_rows: torch.Tensor | None = None,
        image_starts: torch.Tensor | None = None,
        image_sizes: Sequence[tuple[int, int]] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Stream:
        """Return this rank's positions of the embedded rows.

        Args:
            tokens, image, image_rows, image_starts, image_sizes: as in :class:`MultimodalBatch`.
            lengths: its ``document_lengths``.

        Raises:
            UsageError: there are images and the model takes none.
        """
        assert self.embed_tokens is not None  # only where a chunk starts
        mesh = self.mesh
        if self.exchange is None and (image is None or not image.shape[0]):
            hidden = self.embed_tokens(own_positions(tokens, mesh), sequence=mesh.sequence_cut)
        else:
            if self.vision is None:
                raise UsageError("the batch has images, but the model takes none", fix="set model.image_size")
            assert image is not None and image_rows is not None and image_starts is not None
            sizes = sizes_of_images(image, image_sizes)
            images = [image[number, :, :height, :width] for number, (height, width) in enumerate(sizes)]
            made = self.exchange(image) if self.exchange else encode_images(images, self.vision, self.projector)
            hidden = own_positions(place_tokens(self.embed_tokens(tokens), *made, image_rows, image_starts), mesh)
            hidden = split_sequence(hidden, mesh.group("tp")) if mesh.sequence_cut else hidden
        return Stream(hidden, None if lengths is None else lengths_of_rows(lengths, len(tokens)))

    def blocks(self, chunk: int, stream: Stream, cache: KeyValueCache | None = None) -> Stream:
        """Run the layers of one of this stage's chunks; with a cache, for positions that follow those in it."""
        x = stream.hidden
        part = sequence_part(x.shape[1], self.config, self.mesh, stream.lengths, cache)
        if self.compiled is not None:
            self.compiled.expect(x, part)
        for number in self.chunks[chunk]:
            layer = self.layers[str(number)]
            x = computed_again(layer, x, part) if self.config.recompute == "full" else layer(x, part)
        return Stream(x, stream.lengths)

    def head(self, stream: Stream, batch: MultimodalBatch | None = None) -> torch.Tensor:
        """Return this rank's columns and positions of the logits: ``[rows, length / cp, padded vocabulary / tp]``.

        With a batch, return the sum of the losses of this rank's tokens, weighted by ``loss_mask``; equal on
        tensor-parallel ranks.
        """
        assert self.norm is not None and self.lm_head is not None  # only where a chunk ends
        x = self.norm(stream.hidden)
        if batch is None:
            return self.lm_head(x)
        return self.lm_head(x, own_positions(batch.labels, self.mesh), own_positions(batch.loss_mask, self.mesh))

    def run_chunk(self, chunk: int, batch: MultimodalBatch | None, received: Stream | None) -> Stream | LossSums:
        """Run one chunk of layers of this stage, with embedding and loss at the two ends of the model.

        Args:
            chunk: number of the chunk in this stage.
            batch: the micro-batch; required by a chunk that starts or ends the model.
            received: the output of the previous chunk; None for a chunk that starts the model.

        Returns:
            The input of the next chunk; the sums of the loss for a chunk that ends the model.
        """
        if self.mesh.starts(chunk):
            assert batch is not None
            images = batch.image, batch.image_rows, batch.image_starts, batch.image_sizes
            received = self.embed(batch.tokens, *images, batch.known_lengths())
        assert received is not None
        made = self.blocks(chunk, received)
        if not self.mesh.ends(chunk):
            return made
        assert batch is not None
        # Counted on the device, and compared with what the loader counted when the numbers of the step are read.
        return LossSums(self.head(made, batch), own_positions(batch.loss_mask, self.mesh).sum(dtype=torch.float64))

    def loss_sum(self, batch: MultimodalBatch) -> torch.Tensor:
        """Return the sum of the losses of this rank's tokens of a micro-batch, in a model without pipeline."""
        return language_loss(self, batch).loss

    def forward(self, tokens: torch.Tensor, *images: Any) -> torch.Tensor:
        """Return the logits of the token after each of ``tokens``, without pipeline and context parallelism.

        Args:
            tokens: int64 ``[rows, length]``, padded at the end with any values.
            images: ``image``, ``image_rows``, ``image_starts`` and ``image_sizes`` of :class:`MultimodalBatch`, if any.

        Returns:
            This rank's columns: ``[rows, length, padded vocabulary / tp]``.

        Raises:
            UsageError: there are images and the model takes none; or the layers or rows are sharded over ranks.
        """
        self._whole_pipeline()
        if self.mesh.cp > 1:
            raise UsageError("rows are cut over ranks", fix="load the model with cp=1")
        return self.head(self.blocks(0, self.embed(tokens, *images)))[:, : tokens.shape[1]]

    def all_logits(self, tokens: torch.Tensor, *images: Any) -> torch.Tensor:
        """Return logits over the real vocabulary, whole on every rank: ``[rows, length, vocab_size]``."""
        logits = gather_parallel(self(tokens, *images), self.mesh.group("tp"))
        return logits[..., : self.config.vocab_size]

    def _whole_pipeline(self) -> None:
        if self.mesh.pp > 1:
            raise UsageError("the layers are on several pipeline stages", fix="use run_pipeline, or load with pp=1")


def language_loss(model: LlamaModel, batch: MultimodalBatch) -> LossSums:
    """Return the cross-entropy of this rank's tokens: the :class:`Loss` of the model without pipeline."""
    model._whole_pipeline()
    made = model.run_chunk(0, batch, None)
    assert isinstance(made, LossSums)  # one chunk ends the model
    return made
