"""Interface between the trainer and what it trains: the maker of a model, its loss, and its batches.

    Trainer(config, make_model=make_clip, loss=contrastive_loss, metrics=["correct"], task_encoder=Pairs()).run()

The loss of a step is the sum of :attr:`LossSums.loss` over all micro-batches of all ranks, divided by the sum of their
:attr:`TrainingBatch.loss_tokens`, whatever a model counts as its tokens. The built-in language model comes by the same
interface, see :func:`language_model` and :func:`language_loss`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import nn
from typing_extensions import Self

from energon_lite.samples import RestoreKey
from energon_lite.trainer.parallel.mesh import ParallelMesh


class TrainingBatch(Protocol):
    """A micro-batch, as a task encoder makes it. A dataclass derived from ``Batch`` lacks only ``loss_tokens``.

    Attributes:
        loss_tokens: number of terms of the loss: a number, or a float64 scalar on the device of the batch. A batch for
            which it is the number 0, as on a rank whose data has ended, is passed over.
        __restore_key__: key by which the loader makes the batch again.
    """

    @property
    def loss_tokens(self) -> float | torch.Tensor: ...

    @property
    def __restore_key__(self) -> RestoreKey: ...

    def to(self, device: torch.device, /) -> Self:
        """Return a copy with all tensors on ``device``."""


class LossSums(NamedTuple):
    """Result of a loss on a micro-batch. All are sums over its terms, not means.

    Args:
        loss: the loss, a scalar to call ``backward`` of.
        terms: number of its terms, as in :attr:`TrainingBatch.loss_tokens`; a step in which the two differ is an error.
        more: further sums, by the names given as ``metrics``; the run reports their means over ``terms``.
    """

    loss: torch.Tensor
    terms: float | torch.Tensor
    more: Mapping[str, float | torch.Tensor] = {}


C_contra = TypeVar("C_contra", contravariant=True)
M_co = TypeVar("M_co", bound=nn.Module, covariant=True)
M_contra = TypeVar("M_contra", bound=nn.Module, contravariant=True)
B_contra = TypeVar("B_contra", bound=TrainingBatch, contravariant=True)


class MakeModel(Protocol[C_contra, M_co]):
    """Maker of this rank's model, on ``mesh.device``, with its first weights. A resumed run loads its own into it.

    A model that is sharded over the axes ``tp``, ``cp`` or ``pp`` keeps the mesh as its attribute ``mesh``; any other
    model is refused where one of them has several ranks. Data-parallel ranks begin with the first rank's weights.
    """

    def __call__(self, config: C_contra, mesh: ParallelMesh, /) -> M_co: ...


class Loss(Protocol[M_contra, B_contra]):
    """Loss of a micro-batch on this rank, in training and, without gradients, in evaluation."""

    def __call__(self, model: M_contra, batch: B_contra, /) -> LossSums: ...
