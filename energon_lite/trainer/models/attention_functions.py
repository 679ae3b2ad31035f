"""Built-in attention functions, and their choice for a configuration and a device.

Each computes causal attention of a run of queries, which are the last of the keys' positions. Each has its own
representation of the documents of packed rows, which must not attend to each other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.interface import on_device
from energon_lite.trainer.models.registry import AttentionKind, Lengths, Run, find_attention, register_attention


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run) -> torch.Tensor:
    """Attend by torch's scaled dot product attention. Packed documents cost a mask of ``rows x n x m`` bytes."""
    mask = run.mask
    if mask is None and run.start > 0:  # the queries are the last positions: the diagonal ends lower right
        if has_varlen_kernel(q.device, q.dtype):
            return _by_kernel(q, k, v)
        # The same as torch without a kernel for it; torch's own class for such masks cannot be compiled.
        mask = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


def dense_mask(lengths: Lengths, start: int, length: int, device: torch.device) -> torch.Tensor:
    """Return the attention mask of packed documents, bool ``[rows, 1, length, start + length]``."""
    sizes, end = [size for row in lengths for size in row], start + length
    numbers = torch.arange(len(sizes), device=device)
    each = torch.repeat_interleave(numbers, on_device(sizes, device), output_size=sum(sizes))
    documents = each.view(len(lengths), -1)
    same = documents[:, start:end, None] == documents[:, None, :end]
    return (same & same.new_ones(length, end).tril(start))[:, None]


class PackedBounds(NamedTuple):
    """Start of each document among the queries and among the keys of all rows, and the ends: int32 ``[n + 1]``.

    A document may have keys and no queries on this rank. ``longest`` is empty, ``[q, k, 0]`` for the most queries and
    keys of a document: numbers of the host that may change without another compilation.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    longest: torch.Tensor


def packed_bounds(lengths: Lengths, start: int, length: int, device: torch.device) -> PackedBounds:
    """Return the bounds of packed documents, for queries from ``start`` on. The device is not waited for."""
    edges = [[min(at, start + length) for at in accumulate(row, initial=0)] for row in lengths]
    spans = [span for row in edges for span in pairwise(row) if span[0] < span[1]]
    keys = [stop - begin for begin, stop in spans]
    queries = [max(stop, start) - max(begin, start) for begin, stop in spans]
    bounds = on_device([[*accumulate(sizes, initial=0)] for sizes in (queries, keys)], device).to(torch.int32)
    longest = torch.empty(max(queries, default=0), max(keys, default=0), 0, device=device)
    return PackedBounds(bounds[0], bounds[1], longest)


#: Result of :func:`_varlen_attn`, once it is known. The compiler would warn of ``functools.cache``.
_found: list[Callable[..., Any] | None] = []


def _varlen_attn() -> Callable[..., Any] | None:
    """Return torch's ``varlen_attn`` if it supports windows, else None. It takes 2 s to import."""
    if not _found:
        _found.append(_find_varlen_attn())
    return _found[0]


def _find_varlen_attn() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if "enable_gqa" in known:
        return functools.partial(varlen_attn, enable_gqa=True)
    return varlen_attn if "window_size" in known else None  # torch 2.11 groups heads without being told


def has_varlen_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether one kernel can compute all documents of packed rows."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and _varlen_attn() is not None


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run) -> torch.Tensor:
    """Attend in each document of packed rows separately, or in a sliding window, by torch's ``varlen_attn``."""
    if run.mask is None and run.window is None:
        return sdpa(q, k, v, run)
    return _by_kernel(q, k, v, run.mask, run.window)


def _by_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: PackedBounds | None = None, window: int | None = None
) -> torch.Tensor:
    """Attend by one kernel; queries are the last of their documents' keys. Without bounds, rows are documents."""
    if bounds is None:
        rows, longest = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device), (q.shape[2], k.shape[2], 0)
        bounds = PackedBounds(rows * q.shape[2], rows * k.shape[2], q.new_empty(longest))
    kernel = _varlen_attn()
    assert kernel is not None
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    sizes, seen = bounds.longest.shape[:2], (-1 if window is None else window - 1, 0)
    made: torch.Tensor = kernel(*flat, bounds.queries, bounds.keys, *sizes, window_size=seen)
    return made.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


@functools.lru_cache(maxsize=4)
def window_mask(window: int, start: int, length: int, device: torch.device) -> torch.Tensor:
    """Return the mask of a sliding window for rows of one document, bool ``[1, 1, length, start + length]``."""
    ones = torch.ones(1, 1, length, start + length, dtype=torch.bool, device=device)
    return ones.tril(start).triu(start - window + 1)


register_attention("sdpa", sdpa, dense_mask)
register_attention("varlen", varlen, packed_bounds, windows=True)


def choose_attention(config: ModelConfig, device: torch.device) -> AttentionKind:
    """Return the attention function that the configuration names; without its kernel, ``varlen`` is ``sdpa``."""
    if config.attention in ("auto", "varlen"):
        return find_attention("varlen" if has_varlen_kernel(device, config.torch_dtype) else "sdpa")
    return find_attention(config.attention)
