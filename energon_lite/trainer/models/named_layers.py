"""Norms and attention functions that a configuration names: built-in ones, and those that a script registers.

A script registers its own modules and then names them in the configuration, so a configuration alone never imports
code. ``examples/swap_layers.py`` uses the norm and the attention of another library.

The built-in attention functions compute causal attention of a run of queries, which are the last of the keys'
positions. Each has its own representation of the documents of packed rows, which must not attend to each other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from energon_lite.errors import UsageError, require_choice
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.interface import on_device
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import ParameterLayout


@dataclass(frozen=True)
class Run:
    """A run of neighbouring queries of a row, and the mask of their keys.

    Args:
        start, length: their positions in the row; they attend to no key at or after ``start + length``.
        mask: None for all keys up to the query's own position; else the attention function's mask of documents.
        window: the most keys up to the query's own position that it attends to; None for all.
    """

    start: int
    length: int
    mask: Any = None
    window: int | None = None


#: Maker of a module ``[..., hidden] -> [..., hidden]`` that treats each position independently.
NormFactory = Callable[[ModelConfig, ParallelMesh], nn.Module]
#: Queries ``[rows, heads, n, width]``, keys and values ``[rows, kv_heads, m, width]``, their run -> like the queries.
#: The queries are the last n of the m positions; query head i uses key head ``i * kv_heads // heads``.
AttentionFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Run], torch.Tensor]
#: Lengths of the documents of each row, which the host knows without a wait for the device.
Lengths = Sequence[Sequence[int]]
#: Lengths, padding included; start and length of a run; the device -> the attention function's ``run.mask``.
DocumentMask = Callable[[Lengths, int, int, torch.device], Any]
T = TypeVar("T")


@dataclass(frozen=True)
class AttentionKind:
    """An attention function, the maker of its mask for packed documents, and whether it has sliding windows."""

    function: AttentionFunction
    document_mask: DocumentMask
    windows: bool = False


_NORMS: dict[str, NormFactory] = {}
_ATTENTIONS: dict[str, AttentionKind] = {}


def register_norm(name: str, factory: NormFactory) -> None:
    """Register a norm as ``model.norm: <name>``.

    Args:
        name: a new name, or an existing one to replace.
        factory: called with the model's configuration and the mesh for each norm. The module's parameters have layouts
            (:func:`new_parameter`), or get them by :func:`adopt_norm`.

    Example:
        >>> register_norm("layer_norm", lambda config, mesh: adopt_norm(nn.LayerNorm(config.hidden_size), config, mesh))
    """
    _NORMS[name] = factory


def register_attention(
    name: str, function: AttentionFunction, document_mask: DocumentMask | None = None, *, windows: bool = False
) -> None:
    """Register an attention function as ``model.attention: <name>``.

    Args:
        name: a new name, or an existing one to replace.
        function: computes causal attention; see :data:`AttentionFunction`.
        document_mask: maker of ``run.mask`` from the lengths of packed documents. Without this, the function cannot
            separate documents, and packed rows are an error.
        windows: the function sees ``run.window`` keys back only, if that is not None. False: rows that are longer than
            a sliding window are computed by ``sdpa``, with a dense mask.

    Example:
        >>> register_attention("flash", lambda q, k, v, run: flash_attention(q, k, v, causal=True))
    """
    _ATTENTIONS[name] = AttentionKind(function, document_mask or _refuse_documents, windows)


def make_norm(config: ModelConfig, mesh: ParallelMesh) -> nn.Module:
    """Make a norm of the kind that the configuration names."""
    return _find(_NORMS, config.norm, "model.norm")(config, mesh)


def find_attention(name: str) -> AttentionKind:
    """Return the attention function registered under a name."""
    return _find(_ATTENTIONS, name, "model.attention")


def adopt_norm(
    module: nn.Module,
    config: ModelConfig,
    mesh: ParallelMesh,
    *,
    sum_over: tuple[str, ...] | None = None,
    std: float | None = None,
) -> nn.Module:
    """Adapt another library's norm to a model: its type, its device, and layouts for its parameters.

    Args:
        module: a norm; each of its parameters has one initial value throughout.
        config, mesh: those of the model.
        sum_over: see :class:`ParameterLayout`; None for a norm of a rank's part of the sequence.
        std: standard deviation of the initial values of matrices, if there are any.

    Raises:
        UsageError: a parameter has several initial values, which have no meaning in another layout of ranks; make it
            with :func:`new_parameter`.
    """
    axes, layouts = mesh.sequence_axes if sum_over is None else sum_over, {}
    for name, parameter in module.named_parameters():
        start, shape = parameter.detach().flatten(), tuple(parameter.shape)
        if std is not None and len(shape) > 1:
            layouts[name] = ParameterLayout(shape, std=std, sum_over=axes)
        elif bool((start == start[0]).all()):
            layouts[name] = ParameterLayout(shape, mean=float(start[0]), sum_over=axes)
        else:
            raise UsageError(f"parameter {name!r} has no single initial value", fix="make it with new_parameter")
    module.to(device=mesh.device, dtype=config.torch_dtype)  # some of its parameters may be new ones
    for name, parameter in module.named_parameters():
        parameter.parallel_layout = layouts[name]  # type: ignore[attr-defined]
    return module


def _refuse_documents(*_: object) -> Any:
    raise UsageError(
        "this attention function cannot keep packed documents apart",
        fix="register it with a document_mask, or use model.attention=sdpa",
    )


def _find(table: dict[str, T], name: str, at: str) -> T:
    require_choice(name, table, f"nothing is registered as {name!r}", at)
    return table[name]


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
