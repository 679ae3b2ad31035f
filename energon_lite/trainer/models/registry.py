"""Registry of norms and attention functions that a configuration names, built-in and others.

A script registers its own modules and then names them in the configuration, so a configuration alone never imports
code. ``examples/swap_layers.py`` uses the norm and the attention of another library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from energon_lite.errors import UsageError, require_choice
from energon_lite.trainer.parallel.parameters import ParameterLayout

if TYPE_CHECKING:
    from energon_lite.trainer.models.config import ModelConfig
    from energon_lite.trainer.parallel.mesh import ParallelMesh


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
NormFactory = Callable[["ModelConfig", "ParallelMesh"], nn.Module]
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
