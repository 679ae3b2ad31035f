"""Built-in attention functions, and their choice for a configuration and a device.

Each computes causal attention of a run of queries, which are the last of the keys' positions. Each has its own
representation of the documents of packed rows, which must not attend to each other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.registry import AttentionKind, find_attention, register_attention

if TYPE_CHECKING:
    from energon_lite.trainer.models.sequence import Run


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run) -> torch.Tensor:
    """Attend by torch's scaled dot product attention. Packed documents cost a mask of ``rows x n x m`` bytes."""
    return _causal(q, k, v, tail=run.start > 0) if run.mask is None else _masked(q, k, v, run.mask)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, tail: bool) -> torch.Tensor:
    """Attend within one document; with ``tail``, the queries are its last positions: the diagonal ends lower right."""
    if not tail:
        return _masked(q, k, v, None)
    if has_varlen_kernel(q.device, q.dtype):
        return _by_kernel(q, k, v, PackedBounds(*(_row_bounds(x) for x in (q, k))))
    # The same as torch without a kernel for it; torch's own class for such masks cannot be compiled.
    return _masked(q, k, v, q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2]))


def _masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


def dense_mask(documents: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """Return the attention mask of documents, bool ``[rows, 1, length, start + length]``."""
    end = start + length
    same = documents[:, start:end, None] == documents[:, None, :end]
    return (same & same.new_ones(length, end).tril(start))[:, None]


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run) -> torch.Tensor:
    """Attend in each document of a packed row separately, at the cost of the squares of the documents' lengths.

    For CPUs, where calls are cheap; on a GPU, one kernel computes all documents at once.
    """
    if run.mask is None:
        return sdpa(q, k, v, run)
    rows = []
    for row, segments in enumerate(run.mask):
        queries, keys, values = (x[row : row + 1] for x in (q, k, v))
        parts = []
        for begin, first, last in segments:
            asking, seen = slice(first - run.start, last - run.start), slice(begin, last)
            whole = queries[:, :, asking], keys[:, :, seen], values[:, :, seen]
            parts.append(_causal(*whole, tail=first > begin))
        rows.append(torch.cat(parts, dim=2))
    return torch.cat(rows)


class PackedBounds(NamedTuple):
    """Start of each document among the queries and among the keys of all rows, and the ends: int32 ``[n + 1]``.

    A document may have keys and no queries on this rank.
    """

    queries: torch.Tensor
    keys: torch.Tensor


def packed_bounds(documents: torch.Tensor, start: int, length: int) -> PackedBounds:
    """Return the bounds of packed documents, for queries from ``start`` on. Reading their number blocks."""
    rows, end = documents.shape[0], start + length
    seen = documents[:, :end]
    begins = F.pad(seen[:, 1:] != seen[:, :-1], (1, 0), value=True).flatten().nonzero().flatten()
    asked = begins // end * length + (begins % end - start).clamp(min=0)
    both = F.pad(asked, (0, 1), value=rows * length), F.pad(begins, (0, 1), value=rows * end)
    return PackedBounds(*(bounds.to(torch.int32) for bounds in both))


def _row_bounds(x: torch.Tensor) -> torch.Tensor:
    """Return the bounds of the rows of ``[rows, heads, n, width]``, each one document."""
    return torch.arange(0, (x.shape[0] + 1) * x.shape[2], x.shape[2], dtype=torch.int32, device=x.device)


@functools.cache
def _varlen_attn() -> Callable[..., Any] | None:
    """Return torch's ``varlen_attn`` if it supports windows and grouped heads, else None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()
    return varlen_attn if known else None


def has_varlen_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether one kernel can compute all documents of packed rows."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and _varlen_attn() is not None


def varlen_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run) -> torch.Tensor:
    """Compute :func:`varlen` on a GPU, by torch's ``varlen_attn``."""
    return sdpa(q, k, v, run) if run.mask is None else _by_kernel(q, k, v, run.mask)


def _by_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: PackedBounds) -> torch.Tensor:
    """Attend by one kernel; queries are the last of their documents' keys, and a document is at most a row long."""
    kernel, grouped = _varlen_attn(), q.shape[1] != k.shape[1]
    assert kernel is not None
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    made: torch.Tensor = kernel(*flat, *bounds, q.shape[2], k.shape[2], window_size=(-1, 0), enable_gqa=grouped)
    return made.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


def document_segments(documents: torch.Tensor, start: int, length: int) -> list[list[tuple[int, int, int]]]:
    """Return each row's documents among the queries: start in the row, first query, and end here.

    The tokens of a document are contiguous.
    """
    segments = []
    for row in documents.tolist():
        begins = [at for at in range(len(row)) if at == 0 or row[at] != row[at - 1]]
        spans = zip(begins, [*begins[1:], len(row)], strict=True)
        inside = [(begin, max(begin, start), min(end, start + length)) for begin, end in spans]
        segments.append([(begin, first, last) for begin, first, last in inside if first < last])
    return segments


register_attention("sdpa", sdpa, dense_mask)
register_attention("varlen", varlen, document_segments)
register_attention("varlen_kernel", varlen_kernel, packed_bounds)


def choose_attention(config: ModelConfig, device: torch.device) -> AttentionKind:
    """Return the attention function that the configuration names.

    ``auto`` separates packed documents in the fastest available way: by one kernel on a GPU, one by one on a CPU, and
    by a mask if neither is possible (or compilable).
    """
    name = config.attention
    if name in ("auto", "varlen") and has_varlen_kernel(device, config.torch_dtype):
        name = "varlen_kernel"
    elif name == "auto":
        name = "sdpa" if config.compile or device.type == "cuda" else "varlen"
    return find_attention(name)


def describe_attention(config: ModelConfig, device: torch.device, length: int) -> str:
    """Return the names of the kernels for rows of ``length`` tokens, unpacked and packed."""
    kind = choose_attention(config, device)
    q, k = (
        torch.empty(1, heads, length, config.head_width, dtype=config.torch_dtype, device=device, requires_grad=True)
        for heads in (config.num_heads, config.kv_heads)
    )
    grouped = config.num_heads != config.kv_heads
    choice = torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=grouped)
    return f"{SDPBackend(choice).name.lower()}; packed rows: {kind.function.__name__}"
