"""Sharding of sequences over context- and tensor-parallel ranks, rotary positions, attention masks and cached keys.

In a causal row, later tokens cost more, because they attend to more others. So with context parallelism, a row is
divided into ``2 * cp`` chunks and rank r takes the chunks r and ``2 * cp - 1 - r``, a cheap and an expensive one: equal
work for all ranks (the zigzag of Zhu's ring-flash-attention; Megatron-Core and torchtitan do the same).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from energon_lite.trainer.models.attention_functions import choose_attention, window_mask
from energon_lite.trainer.models.batch import document_lengths
from energon_lite.trainer.models.config import ModelConfig, RopeScaling
from energon_lite.trainer.models.registry import AttentionFunction, Lengths, Run, find_attention
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
    documents: torch.Tensor | None = None,
    cache: KeyValueCache | None = None,
    lengths: Sequence[int] | None = None,
) -> SequencePart:
    """Prepare the attention of a micro-batch's rows: one for all layers.

    Args:
        local: number of positions that this rank holds between blocks.
        config: the model's shape.
        mesh: the ranks.
        documents: int64 ``[rows, length]`` of whole rows; tokens attend to earlier ones of their own document only.
            None: each row is one document.
        cache: the positions before these in their rows, which are then not sharded over ranks; ``documents`` includes
            them.
        lengths: ``document_lengths`` of the batch; None if unknown: the host may then read ``documents``, and waits.
    """
    length = whole_length(local, mesh)
    runs = runs_of_rank(length, mesh) if cache is None else [(cache.length, length)]
    positions = torch.cat([torch.arange(start, start + number, device=mesh.device) for start, number in runs])
    kind, window = choose_attention(config, mesh.device), config.sliding_window
    if window is not None and max(map(sum, runs)) <= window:
        window = None
    dense = window is not None and not kind.windows
    kind, parts = find_attention("sdpa") if dense else kind, []
    for run in runs:
        mask = None
        if documents is not None and kind.length_mask is not None:
            mask = kind.length_mask(lengths_of_rows(documents, lengths), *run, mesh.device)
        elif documents is not None:
            mask = kind.document_mask(documents, *run)
        if window is not None and dense:
            near = window_mask(window, *run, mesh.device)
            mask = near if mask is None else mask & near
        parts.append(Run(*run, mask, window))
    return SequencePart(rotation_table(positions, config), tuple(parts), kind.function, mesh, cache)


def lengths_of_rows(documents: torch.Tensor, lengths: Sequence[int] | None) -> Lengths:
    """Return the lengths of each row's documents; what ``lengths`` leave of a row is padding."""
    rows, length = documents.shape
    lengths = document_lengths(documents.cpu()) if lengths is None else lengths
    made: list[list[int]] = [[] for _ in range(rows)]
    whole, at = sum(lengths) // max(rows, 1), 0
    for size in lengths:
        made[at // whole].append(size)
        at += size
    return [[*row, length - whole] for row in made]


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


def pad_rows(x: torch.Tensor, mesh: ParallelMesh, value: float = 0.0) -> torch.Tensor:
    """Pad rows ``[rows, length, ...]`` at the end to the next length that can be divided over the ranks."""
    more = whole_length(local_length(x.shape[1], mesh), mesh) - x.shape[1]
    return x if more == 0 else F.pad(x, (0, 0) * (x.dim() - 2) + (0, more), value=value)


def own_positions(x: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    """Return this context-parallel rank's positions: ``[rows, length, ...]`` -> ``[rows, padded / cp, ...]``."""
    x = pad_rows(x, mesh)
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


def rotation_table(positions: torch.Tensor, config: ModelConfig) -> Rotation:
    """Return the angles of rotary position embedding (Su et al., RoFormer, arXiv:2104.09864).

    Positions of a packed row are not reset per document: only differences matter, and these are right in each document.
    """
    width = config.head_width
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is not None:
        frequencies = scaled_frequencies(frequencies, config.rope_scaling)
    angles = positions.to(torch.float64)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(config.torch_dtype), angles.sin().to(config.torch_dtype)


def scaled_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Return rotary frequencies for rows longer than those trained on, by the rule of Llama 3.1 (Meta, 2024).

    Waves that are short compared to the old context are kept, those longer than it are stretched by ``factor``, and
    between the two bounds the frequency is interpolated.
    """
    turns = scaling.original_length * frequencies / (2 * torch.pi)
    kept = (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
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
