"""Sharding of sequences over context- and tensor-parallel ranks, rotary positions, attention masks and cached keys.

In a causal row, later tokens cost more, because they attend to more others. So with context parallelism, a row is
divided into ``2 * cp`` chunks and rank r takes the chunks r and ``2 * cp - 1 - r``, a cheap and an expensive one: equal
work for all ranks (the zigzag of Zhu's ring-flash-attention; Megatron-Core and torchtitan do the same).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from energon_lite.trainer.models.config import ModelConfig, RopeScaling
from energon_lite.trainer.models.named_layers import (
    AttentionFunction,
    Lengths,
    Run,
    choose_attention,
    find_attention,
    window_mask,
)
from energon_lite.trainer.parallel.collectives import gather_sequence
from energon_lite.trainer.parallel.mesh import ParallelMesh

#: Cosines and sines of the rotation angles, each ``[length, head_width]``.
Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class SequencePart:
    """This rank's part of the rows of a micro-batch; equal for all layers.

    Args:
        rotation: the rotation of this rank's positions.
        runs: the runs of this rank's positions, in the order in which it holds them.
        attention: the attention function.
        mesh: the ranks.
        cache: keys and values of earlier calls for these rows in text generation; else None.
    """

    rotation: Rotation
    runs: tuple[Run, ...]
    attention: AttentionFunction
    mesh: ParallelMesh
    cache: KeyValueCache | None = None


def sequence_part(
    local: int,
    config: ModelConfig,
    mesh: ParallelMesh,
    lengths: Lengths | None = None,
    cache: KeyValueCache | None = None,
) -> SequencePart:
    """Prepare the attention of a micro-batch's rows: one for all layers.

    Args:
        local: number of positions that this rank holds between blocks.
        config: the model's shape.
        mesh: the ranks.
        lengths: tokens of the documents of each row, without padding at its end; tokens attend to earlier ones of their
            own document only. None: each row is one document.
        cache: the positions before these in their rows, which are then not sharded over ranks; ``lengths`` include
            them.
    """
    length = whole_length(local, mesh)
    before = 0 if cache is None else cache.length
    runs = runs_of_rank(length, mesh) if cache is None else [(before, length)]
    kind, window = choose_attention(config, mesh.device), config.sliding_window
    if window is not None and max(map(sum, runs)) <= window:
        window = None
    dense = window is not None and not kind.windows
    kind, parts = find_attention("sdpa") if dense else kind, []
    padded = None if lengths is None else [[*row, before + length - sum(row)] for row in lengths]
    for run in runs:
        mask = None if padded is None else kind.document_mask(padded, *run, mesh.device)
        if window is not None and dense:
            near = window_mask(window, *run, mesh.device)
            mask = near if mask is None else mask & near
        parts.append(Run(*run, mask, window))
    return SequencePart(rotations(tuple(runs), config, mesh.device), tuple(parts), kind.function, mesh, cache)


def lengths_of_rows(lengths: Sequence[int], rows: int) -> list[list[int]]:
    """Divide the lengths of documents, row after row, into those of each row; rows are equally long."""
    made: list[list[int]] = [[] for _ in range(rows)]
    whole, at = sum(lengths) // max(rows, 1), 0
    for size in lengths:
        made[at // whole].append(size)
        at += size
    return made


def whole_length(local: int, mesh: ParallelMesh) -> int:
    """Return the length of a row of which a rank holds ``local`` positions between blocks."""
    return local * mesh.cp * (mesh.tp if mesh.sequence_cut else 1)


def local_length(length: int, mesh: ParallelMesh) -> int:
    """Return the number of positions of a row that a rank holds between blocks, padding included."""
    even, ranks = (2 if mesh.cp > 1 else 1), whole_length(1, mesh)
    return -(-length // (even * ranks)) * even


def runs_of_rank(length: int, mesh: ParallelMesh) -> list[tuple[int, int]]:
    """Return start and length of the runs of positions of this rank."""
    if mesh.cp == 1:
        return [(0, length)]
    rank, chunk = mesh.rank("cp"), length // (2 * mesh.cp)
    return [(rank * chunk, chunk), ((2 * mesh.cp - 1 - rank) * chunk, chunk)]


def own_positions(x: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    """Return this context-parallel rank's positions: ``[rows, length, ...]`` -> ``[rows, padded / cp, ...]``.

    Rows are padded at the end to the next length that can be divided over the ranks.
    """
    if more := whole_length(local_length(x.shape[1], mesh), mesh) - x.shape[1]:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, more))
    if mesh.cp == 1:
        return x
    return torch.cat([x.narrow(1, start, length) for start, length in runs_of_rank(x.shape[1], mesh)], dim=1)


def gather_positions(x: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    """Gather whole rows in order: ``[..., length / cp, width]`` -> ``[..., length, width]``.

    The ranks compute different results from the rows, so backward sums the gradients over ranks.
    """
    if mesh.cp == 1:
        return x
    chunks = gather_sequence(x, mesh.group("cp")).chunk(2 * mesh.cp, dim=-2)
    return torch.cat([*chunks[0::2], *reversed(chunks[1::2])], dim=-2)


@functools.lru_cache(maxsize=4)
def rotations(runs: tuple[tuple[int, int], ...], config: ModelConfig, device: torch.device) -> Rotation:
    """Return the :func:`rotation_table` of runs of positions, which rows of one length share."""
    positions = [torch.arange(start, start + length, device=device) for start, length in runs]
    return rotation_table(torch.cat(positions), config)


def rotation_table(positions: torch.Tensor, config: ModelConfig) -> Rotation:
    """Return the angles of rotary position embedding (Su et al., RoFormer, arXiv:2104.09864).

    Positions of a packed row are not reset per document: only differences matter, and these are right in each document.
    """
    width = config.head_width
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is not None:
        frequencies = scaled_frequencies(frequencies, scaling, config.rope_theta)
    angles = positions.to(torch.float64)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    size = 1.0 if scaling is None or scaling.attention_factor is None else scaling.attention_factor
    return (angles.cos() * size).to(config.torch_dtype), (angles.sin() * size).to(config.torch_dtype)


def scaled_frequencies(frequencies: torch.Tensor, scaling: RopeScaling, theta: float) -> torch.Tensor:
    """Return rotary frequencies for rows longer than those trained on.

    Waves that are short compared to the old context are kept, those longer than it are stretched by ``factor``, and
    those between the two bounds partly: by the rule of Llama 3.1 (Meta, 2024), as far as their number of turns is
    between the bounds; by that of YaRN (Peng et al., arXiv:2309.00071), as far as their place in the table is.

    Args:
        frequencies: the frequencies ``theta ** (-i / n)`` of the ``n`` waves.
        scaling: the rule.
        theta: their base.
    """
    low, high = scaling.low_frequency, scaling.high_frequency or 0.0
    if scaling.kind == "linear":
        kept = torch.zeros_like(frequencies)
    elif scaling.kind == "llama3":
        kept = (scaling.original_length * frequencies / (2 * torch.pi) - low) / (high - low)
    else:
        waves = len(frequencies)
        first, last = (
            waves * math.log(scaling.original_length / (2 * math.pi * turns)) / math.log(theta) for turns in (high, low)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * waves - 1)
        places = torch.arange(waves, dtype=frequencies.dtype, device=frequencies.device)
        kept = 1 - (places - first) / (last - first or 1e-3)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)


class KeyValueCache:
    """Keys and values of each attention layer of this rank, for rows that grow by some tokens at a time.

    Args:
        capacity: the most positions of a row, including those that pad a step.

    Attributes:
        length: computed positions of each row. A caller that has run ``n`` more through the model adds ``n`` to it;
            values written behind them are padding, and the next step overwrites them.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self._kept: dict[nn.Module, torch.Tensor] = {}

    def extend(self, layer: nn.Module, keys_and_values: torch.Tensor) -> torch.Tensor:
        """Append ``[rows, heads, n, width]`` of a layer; return all of it, ``[rows, heads, length + n, width]``."""
        rows, heads, new, width = keys_and_values.shape
        if layer not in self._kept:
            self._kept[layer] = keys_and_values.new_empty(rows, heads, self.capacity, width)
        kept, end = self._kept[layer], self.length + new
        kept[:, :, self.length : end] = keys_and_values
        return kept[:, :, :end]
