"""Linear layers and an embedding with weights sharded over the tensor-parallel ranks.

Weights have the shapes of ``torch.nn``: ``[out, in]`` for a linear layer, ``[vocabulary, hidden]`` for an embedding.
With :attr:`ParallelMesh.sequence_cut`, inputs and outputs are sharded along the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from energon_lite.trainer.parallel.collectives import (
    enter_parallel,
    gather_parallel,
    leave_parallel,
    overlapped_products,
)
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import ParameterLayout, new_parameter


class ColumnParallelLinear(nn.Module):
    """Linear layer ``y = x W^T + b`` sharded along its outputs: a rank makes ``out_features / tp`` features.

    Args:
        in_features, out_features: sizes of the whole layer.
        mesh: the ranks.
        bias: add a bias (sharded like the outputs).
        gather_output: return all features on every rank; otherwise this rank's, for a :class:`RowParallelLinear`.
        std: standard deviation of the initial weights.
        dtype: type of the weights.

    Raises:
        TopologyError: ``out_features`` is not a multiple of ``mesh.tp``.

    Example:
        >>> ColumnParallelLinear(8, 16, mesh)(torch.ones(2, 8)).shape  # with tp=2
        torch.Size([2, 8])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: ParallelMesh,
        *,
        bias: bool = False,
        gather_output: bool = False,
        std: float = 0.02,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.group = mesh.group("tp")
        self.sequence = mesh.sequence_cut
        self.gather_output = gather_output
        self.weight = new_parameter(ParameterLayout((out_features, in_features), 0, std), mesh, dtype)
        self.bias = new_parameter(ParameterLayout((out_features,), 0), mesh, dtype) if bias else None

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Prepare the input, for this layer and others that share it; see :func:`enter_parallel`."""
        return enter_parallel(x, self.group, sequence=self.sequence)

    def forward(self, x: torch.Tensor, *, entered: bool = False) -> torch.Tensor:
        """Map ``[..., in_features]`` -> ``[..., out_features / tp]``, or all features with ``gather_output``.

        With ``entered``, the input has passed :meth:`enter`: layers with one input share its communication.
        """
        x = x if entered else self.enter(x)
        y = F.linear(x, self.weight, self.bias)
        return gather_parallel(y, self.group) if self.gather_output else y


class Projections(nn.Module):
    """Base of modules that apply several column-parallel layers to one input.

    Args:
        mesh: the ranks.

    Attributes:
        reads_children: tells an optimizer that replaces weights in the background to finish before the call.
    """

    def __init__(self, mesh: ParallelMesh):
        super().__init__()
        self.reads_children = mesh.tp > 1

    def layers(self) -> Sequence[ColumnParallelLinear]:
        """Return the layers that share an input."""
        raise NotImplementedError

    def project(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Apply the layers to one input, with shared communication."""
        layers = self.layers()
        group, sequence = layers[0].group, layers[0].sequence
        if group is None or torch.compiler.is_compiling():  # a wait cannot be compiled
            x = layers[0].enter(x)
            return [layer(x, entered=True) for layer in layers]
        made = overlapped_products(x, [layer.weight for layer in layers], group, sequence=sequence)
        return [y if layer.bias is None else y + layer.bias for layer, y in zip(layers, made, strict=True)]


class RowParallelLinear(nn.Module):
    """Linear layer ``y = x W^T + b`` sharded along its inputs: a rank has a part of the features, all get the sum.

    Args:
        in_features, out_features: sizes of the whole layer.
        mesh: the ranks.
        bias: add a bias (whole on every rank, added once).
        std: standard deviation of the initial weights.
        dtype: type of the weights.

    Raises:
        TopologyError: ``in_features`` is not a multiple of ``mesh.tp``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: ParallelMesh,
        *,
        bias: bool = False,
        std: float = 0.02,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.group = mesh.group("tp")
        self.sequence = mesh.sequence_cut
        self.weight = new_parameter(ParameterLayout((out_features, in_features), 1, std), mesh, dtype)
        whole = ParameterLayout((out_features,), sum_over=mesh.sequence_axes)
        self.bias = new_parameter(whole, mesh, dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[..., in_features / tp]`` -> ``[..., out_features]``, equal on all ranks, or sharded by sequence."""
        y = leave_parallel(F.linear(x, self.weight), self.group, sequence=self.sequence)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """Table of token embeddings, sharded along the vocabulary.

    Args:
        rows: size of the table (the padded vocabulary, :attr:`ModelConfig.padded_vocab_size`).
        hidden: width of an embedding.
        mesh: the ranks.
        std: standard deviation of the initial weights.
        dtype: type of the weights.
        sum_over: see :class:`ParameterLayout`.

    Raises:
        TopologyError: ``rows`` is not a multiple of ``mesh.tp``.
    """

    def __init__(
        self,
        rows: int,
        hidden: int,
        mesh: ParallelMesh,
        *,
        std: float = 0.02,
        dtype: torch.dtype = torch.float32,
        sum_over: tuple[str, ...] = (),
    ):
        super().__init__()
        self.group = mesh.group("tp")
        self.weight = new_parameter(ParameterLayout((rows, hidden), 0, std, sum_over=sum_over), mesh, dtype)
        self.first = mesh.rank("tp") * (rows // mesh.tp)

    def forward(self, tokens: torch.Tensor, *, sequence: bool = False) -> torch.Tensor:
        """Look up embeddings: tokens ``[...]`` -> ``[..., hidden]``, equal on all ranks.

        With ``sequence``, each rank gets its part: ``[rows, length]`` -> ``[rows, length / tp, hidden]``.
        """
        if self.group is None:
            return F.embedding(tokens, self.weight)
        # A rank looks up the tokens it owns and adds zeros for the rest; the sum over ranks is the embedding.
        row = tokens - self.first
        mine = (row >= 0) & (row < self.weight.shape[0])
        embeddings = F.embedding(row.masked_fill(~mine, 0), self.weight)
        return leave_parallel(embeddings.masked_fill(~mine.unsqueeze(-1), 0.0), self.group, sequence=sequence)
