"""Positions in rows of tokens: the parts of context-parallel ranks, and grids of images.

With a causal mask, later tokens attend to more tokens, so of ``size`` contiguous pieces the last would cost the most.
The zigzag cut makes ``2 * size`` chunks and gives rank ``r`` the chunks ``r`` and ``2 * size - 1 - r``: all ranks then
have equal work. (Both cuts are those of Megatron-Core; the zigzag is from Zhu's ring-flash-attention.) In a packed row
each document is cut separately, so that each rank has an equal part of each.

Loaders give the same batch to all context-parallel peers; each peer then takes its part:

    >>> batch = context_parallel_slice(batch, {"tokens": 1, "labels": 1}, rank=mesh["cp"].get_local_rank(), size=2)
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeVar, get_args

import torch

from energon_lite.errors import TopologyError, UsageError, field_of

T = TypeVar("T")

Cut = Literal["zigzag", "plain"]


def context_parallel_positions(
    length: int,
    *,
    rank: int,
    size: int,
    cut: Cut = "zigzag",
    documents: Sequence[int] | torch.Tensor | None = None,
) -> torch.Tensor:
    """Positions of a sequence that a rank holds, in increasing order inside each document.

    Args:
        length: length of the sequence, in tokens.
        rank: this rank's number among the context-parallel ranks.
        size: number of these ranks.
        cut: ``zigzag`` (equal work under a causal mask) or ``plain`` (one contiguous piece).
        documents: the bounds ``[0, ..., length]`` of the documents of a packed row (``cu_seqlens``); None: one.

    Returns:
        int64 ``[length / size]``. In a row with one document these are also its tokens' ``position_ids``.

    Raises:
        TopologyError: a document cannot be cut into equal chunks; the message says to which multiple to pad.

    Example:
        >>> [context_parallel_positions(8, rank=rank, size=2).tolist() for rank in (0, 1)]
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if cut not in get_args(Cut):
        raise UsageError(f"cut is {cut!r}", fix="give 'zigzag' or 'plain'")
    if size < 1 or not 0 <= rank < size:
        raise TopologyError(f"context-parallel rank {rank} of {size}", fix="give 0 <= rank < size")
    bounds = [0, length] if documents is None else [int(bound) for bound in documents]
    if bounds[0] != 0 or bounds[-1] != length or any(a > b for a, b in pairwise(bounds)):
        raise UsageError(
            f"the documents' bounds {_shown(bounds)} do not fill a row of {length} tokens",
            fix="give cu_seqlens: from 0 to the length, never decreasing",
        )
    chunks = 2 * size if cut == "zigzag" else size
    held = (rank, 2 * size - 1 - rank) if cut == "zigzag" else (rank,)
    pieces = []
    for start, stop in pairwise(bounds):
        step, rest = divmod(stop - start, chunks)
        if rest:
            raise TopologyError(
                f"a document of {stop - start} tokens cannot be cut into {chunks} equal chunks (cp={size}, {cut})",
                fix=f"pad each document to a multiple of {chunks} tokens",
            )
        pieces += [torch.arange(start + chunk * step, start + (chunk + 1) * step) for chunk in held]
    return torch.cat(pieces)


def context_parallel_slice(
    batch: T,
    fields: Mapping[str, int],
    *,
    rank: int,
    size: int,
    cut: Cut = "zigzag",
    documents: str | None = None,
) -> T:
    """Copy of a batch in which the given fields hold this rank's part of the sequence.

    Args:
        batch: a dict or a dataclass.
        fields: the tensors to cut, each with its sequence dimension, such as ``{"tokens": 1, "mask": -1}``. All have
            equal lengths in that dimension.
        rank, size, cut: see :func:`context_parallel_positions`.
        documents: the field with the bounds of the documents (``cu_seqlens``), for batches of one packed row. It is
            not cut: attention needs the bounds in the whole row.

    Raises:
        UsageError: the batch has no such field, or the fields have different lengths.
        TopologyError: see :func:`context_parallel_positions`.
    """
    if not isinstance(batch, dict) and not dataclasses.is_dataclass(batch):
        raise UsageError(
            f"the fields of a {type(batch).__name__} cannot be cut", fix="make batches dicts or dataclasses"
        )
    missing = [name for name in (*fields, *([documents] if documents else [])) if field_of(batch, name) is None]
    if missing or not fields:
        raise UsageError(
            f"there is no tensor {missing[0]!r} in a {type(batch).__name__}" if missing else "no fields are named",
            fix="name tensors of the batch, with the dimension that is their sequence",
        )
    lengths = {name: field_of(batch, name).shape[dim] for name, dim in fields.items()}
    if len(set(lengths.values())) > 1:
        raise UsageError(
            f"the fields have sequences of different lengths: {lengths}", fix="give their sequence dimension"
        )
    bounds = None if documents is None else field_of(batch, documents)
    length = next(iter(lengths.values()))
    positions = context_parallel_positions(length, rank=rank, size=size, cut=cut, documents=bounds)
    changed: Any = copy.copy(batch)
    for name, dim in fields.items():
        tensor = field_of(batch, name)
        part = tensor.index_select(dim, positions.to(tensor.device))
        if isinstance(changed, dict):
            changed[name] = part
        else:
            object.__setattr__(changed, name, part)
    return changed


def _shown(bounds: Sequence[int]) -> str:
    return str(bounds) if len(bounds) < 8 else f"[{bounds[0]}, {bounds[1]}, ..., {bounds[-1]}]"


def mrope_positions(length: int, starts: Sequence[int], grids: Sequence[Sequence[int]]) -> torch.Tensor:
    """Frame, row and column of each position of one sample, ``[3, length]``.

    Text positions count up by one, equal in all three dimensions. Each position of an image has its place in the grid,
    offset by the end of the text before it; the text after the image continues from the largest of these values.

    Args:
        length: positions of the sample. An image may be cut at the sample's end.
        starts: the first position of each image, ascending.
        grids: frames, rows and columns of each image or clip, in positions (after merging of patches into tokens).

    Returns:
        int64 ``[3, length]``.

    Raises:
        UsageError: images overlap, or the numbers of images and grids differ.

    Example:
        >>> mrope_positions(8, [1], [(1, 2, 2)])  # a token, an image of two rows and columns, three tokens
        tensor([[0, 1, 1, 1, 1, 3, 4, 5],
                [0, 1, 1, 2, 2, 3, 4, 5],
                [0, 1, 2, 1, 2, 3, 4, 5]])
    """
    if len(starts) != len(grids):
        raise UsageError(f"{len(starts)} images have {len(grids)} grids", fix="give a grid for each image")
    parts: list[torch.Tensor] = []
    at = following = 0
    for start, (frames, rows, columns) in zip(starts, grids, strict=True):
        if not at <= start <= length:
            raise UsageError(
                f"an image begins at position {start}, but the image before it ends at {at}, and the row at {length}",
                fix="give the images of one sample, in order of position",
            )
        parts.append(torch.arange(following, following + start - at).expand(3, -1))
        following += start - at
        axes = (torch.arange(size) + following for size in (frames, rows, columns))
        parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)[:, : length - start])
        at = start + frames * rows * columns
        following += max(frames, rows, columns)
    parts.append(torch.arange(following, following + max(0, length - at)).expand(3, -1))
    return torch.cat(parts, dim=1)
