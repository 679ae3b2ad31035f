"""Modules that a configuration names: norms and attention functions, ours and others'.

A script registers what it brings and then names it in the configuration, so a configuration by itself never imports
code. ``examples/swap_layers.py`` takes the norm and the attention of another library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from energon_lite.errors import ConfigError, UsageError
from energon_lite.trainer.parallel.parameters import ParameterLayout

if TYPE_CHECKING:
    from energon_lite.trainer.models.config import ModelConfig
    from energon_lite.trainer.models.sequence import Run
    from energon_lite.trainer.parallel.mesh import ParallelMesh

#: Makes a module ``[..., hidden] -> [..., hidden]`` that treats each position by itself.
NormFactory = Callable[["ModelConfig", "ParallelMesh"], nn.Module]
#: Queries ``[rows, heads, n, width]``, keys and values ``[rows, kv_heads, m, width]``, their run -> like the queries.
#: The queries are the last n of the m positions; query head i uses key head ``i * kv_heads // heads``.
AttentionFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "Run"], torch.Tensor]
#: Documents int64 ``[rows, length]``, start and length of a run -> what the function finds as ``run.mask``.
DocumentMask = Callable[[torch.Tensor, int, int], Any]
T = TypeVar("T")


@dataclass(frozen=True)
class AttentionKind:
    """An attention function, and how it is told about packed documents."""

    function: AttentionFunction
    document_mask: DocumentMask


_NORMS: dict[str, NormFactory] = {}
_ATTENTIONS: dict[str, AttentionKind] = {}


def register_norm(name: str, factory: NormFactory) -> None:
    """Make ``model.norm: <name>`` mean this module.

    Args:
        name: a new name, or one whose meaning is to change.
        factory: called with the model's configuration and the mesh for each norm. The module's parameters have layouts
            (:func:`new_parameter`), or get them from :func:`adopt_norm`.

    Example:
        >>> register_norm("layer_norm", lambda config, mesh: adopt_norm(nn.LayerNorm(config.hidden_size), config, mesh))
    """
    _NORMS[name] = factory


def register_attention(name: str, function: AttentionFunction, document_mask: DocumentMask | None = None) -> None:
    """Make ``model.attention: <name>`` mean this function.

    Args:
        name: a new name, or one whose meaning is to change.
        function: computes causal attention; see :data:`AttentionFunction`.
        document_mask: makes ``run.mask`` of the documents of packed rows. None: the function cannot keep documents
            apart, and packed rows are refused.

    Example:
        >>> register_attention("flash", lambda q, k, v, run: flash_attention(q, k, v, causal=True))
    """
    _ATTENTIONS[name] = AttentionKind(function, _refuse_documents if document_mask is None else document_mask)


def make_norm(config: ModelConfig, mesh: ParallelMesh) -> nn.Module:
    """A norm of the kind that the configuration names."""
    return _find(_NORMS, config.norm, "model.norm")(config, mesh)


def find_attention(name: str) -> AttentionKind:
    """The attention function that the configuration names."""
    return _find(_ATTENTIONS, name, "model.attention")


def adopt_norm(module: nn.Module, config: ModelConfig, mesh: ParallelMesh) -> nn.Module:
    """Fit another library's norm into a model: its type, its device, and layouts for its parameters.

    Args:
        module: each of its parameters starts with one value throughout, as norms' do.
        config, mesh: of the model.

    Raises:
        UsageError: a parameter starts with different values. Then nobody can say what it is in another layout of ranks;
            make it with :func:`new_parameter`.
    """
    module.to(device=mesh.device, dtype=config.torch_dtype)
    for name, parameter in module.named_parameters():
        start = parameter.detach().flatten()
        if not bool((start == start[0]).all()):
            raise UsageError(f"parameter {name!r} has no single initial value", fix="make it with new_parameter")
        layout = ParameterLayout(tuple(parameter.shape), mean=float(start[0]), sum_over=mesh.sequence_axes)
        parameter.parallel_layout = layout  # type: ignore[attr-defined]
    return module


def _refuse_documents(documents: torch.Tensor, start: int, length: int) -> Any:
    raise UsageError(
        "this attention function cannot keep packed documents apart",
        fix="register it with a document_mask, or use model.attention=sdpa",
    )


def _find(table: dict[str, T], name: str, at: str) -> T:
    if name not in table:
        raise ConfigError(f"nothing is registered as {name!r}", at=at, choices=list(table), suggest_for=name)
    return table[name]
