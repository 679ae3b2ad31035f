"""Interface between the trainer and what it trains: the maker of a model, its loss, and its batches.

    Trainer(config, make_model=make_clip, loss=contrastive_loss, metrics=["correct"], task_encoder=Pairs()).run()

The loss of a step is the sum of :attr:`LossSums.loss` over all micro-batches of all ranks, divided by the sum of their
:attr:`TrainingBatch.loss_tokens`, whatever a model counts as its tokens. The built-in language model comes by the same
interface, see :func:`language_model` and :func:`language_loss`; its batches are rows of tokens with placeholders for
images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn
from typing_extensions import Self

from energon_lite import Batch, edataclass
from energon_lite.errors import UsageError, listed
from energon_lite.samples import RestoreKey
from energon_lite.trainer.parallel.mesh import ParallelMesh

_no_numbers = partial(torch.zeros, 0, dtype=torch.int64)


@edataclass
class MultimodalBatch(Batch):
    """Rows of tokens, some of which are placeholders for images. A batch of text needs the first three fields only.

    Args:
        tokens: int64 ``[rows, length]``, padded at the end.
        labels: int64 ``[rows, length]``, the token after each.
        loss_mask: float32 ``[rows, length]``, the weight of each label: 1, and 0 at images and padding.
        image: float32 ``[images, 3, height, width]`` in [0, 1]; a smaller image is in the upper left corner.
        image_rows: int64 ``[images]``, the row of each image.
        image_starts: int64 ``[images]``, the position in its row at which an image begins; its placeholder tokens may
            have any value.
        image_sizes: height and width of each image; None: all have the size of ``image``. (Not a tensor, because the
            computation depends on it.)
        documents: int64 ``[rows, length]``, number >= 0 of the document of each token in a packed row; a token attends
            to its own document only. None: each row is one document.
        document_lengths: tokens of each document, row after row, with padding as a document of its own. (Not a tensor,
            because the computation depends on it.) None: unknown.
        counted: sum of ``loss_mask``, so that the device need not compute it; None: unknown.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    image: torch.Tensor = field(default_factory=partial(torch.zeros, 0, 3, 0, 0))
    image_rows: torch.Tensor = field(default_factory=_no_numbers)
    image_starts: torch.Tensor = field(default_factory=_no_numbers)
    documents: torch.Tensor | None = None
    image_sizes: list[tuple[int, int]] | None = None
    document_lengths: list[int] | None = None
    counted: float | None = None
    __key__: list[str] = field(default_factory=list)
    __restore_key__: tuple[Any, ...] = ()

    @property
    def loss_tokens(self) -> float | torch.Tensor:
        """Sum of ``loss_mask``."""
        return self.loss_mask.sum(dtype=torch.float64) if self.counted is None else self.counted

    def known_lengths(self) -> list[int] | None:
        """Return ``document_lengths``; unknown ones are found in ``documents``, for which the host waits, and kept."""
        if self.document_lengths is None and self.documents is not None:
            self.document_lengths = document_lengths(self.documents.cpu())
        return self.document_lengths


def on_device(numbers: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Copy integers of the host to a device, from pinned memory, so that the host does not wait for the device."""
    here = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)


def sizes_of_images(image: torch.Tensor, sizes: Sequence[tuple[int, int]] | None) -> list[tuple[int, int]]:
    """Return height and width of each image.

    Args:
        image, sizes: as in :class:`MultimodalBatch`; only shapes are used.
    """
    return [(image.shape[2], image.shape[3])] * len(image) if sizes is None else list(sizes)


def document_lengths(documents: torch.Tensor) -> list[int]:
    """Return the tokens of each document, row after row.

    Args:
        documents: as in :class:`MultimodalBatch`, on the host.

    Example:
        >>> document_lengths(torch.tensor([[0, 0, 1], [2, 2, 2]]))
        [2, 1, 3]
    """
    if not documents.numel():
        return []
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    ends = torch.cat([begins.flatten().nonzero().flatten(), torch.tensor([documents.numel()])])
    return ends.diff().tolist()


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


def checked_sums(made: object, metrics: Sequence[str]) -> LossSums:
    """Return the result of a loss, if it has what the trainer needs.

    Args:
        made: the result.
        metrics: names of the further sums.

    Raises:
        UsageError: it is of another type, the loss is no scalar, or a further sum is missing.
    """
    fix = "return LossSums(loss, terms, more): a scalar tensor, its number of terms, and a sum for each of `metrics`"
    if not isinstance(made, LossSums):
        raise UsageError(f"the loss has returned {type(made).__name__}, not LossSums", fix=fix)
    if not isinstance(made.loss, torch.Tensor) or made.loss.dim():
        raise UsageError(f"LossSums.loss is not a scalar tensor: {getattr(made.loss, 'shape', made.loss)}", fix=fix)
    if missing := [name for name in metrics if name not in made.more]:
        raise UsageError(f"LossSums.more lacks metrics of the run: {listed(missing)}", fix=fix)
    return made


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
