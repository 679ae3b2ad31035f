"""What a model is trained on: rows of tokens, among which images keep their places."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from energon_lite import Batch, edataclass


@edataclass
class MultimodalBatch(Batch):
    """Rows of tokens, some of which keep the place of an image.

    Args:
        tokens: int64 ``[rows, length]``, padded at the end.
        labels: int64 ``[rows, length]``, the token that follows each.
        loss_mask: float32 ``[rows, length]``, how much each label counts: 1, and 0 at images and padding.
        image: float32 ``[images, 3, height, width]`` in [0, 1]; one that is smaller is in the upper left corner.
        image_rows: int64 ``[images]``, the row each image belongs to.
        image_starts: int64 ``[images]``, the position in its row at which an image begins: tokens, any, keep its place.
        image_sizes: height and width of each image; None: all are as large as ``image`` is. (No tensor, since what is
            to be computed depends on it.)
        documents: int64 ``[rows, length]``, which document, >= 0, of a packed row each token belongs to; a token sees
            those of its own document only. None: of its row.
        document_lengths: tokens of each document, one row behind the other, padding as a document of its own. (No
            tensor: a pipeline's order depends on it.) None: not known; then a row counts as one document there.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    image: torch.Tensor
    image_rows: torch.Tensor
    image_starts: torch.Tensor
    documents: torch.Tensor | None = None
    image_sizes: list[tuple[int, int]] | None = None
    document_lengths: list[int] | None = None


def sizes_of_images(image: torch.Tensor, sizes: Sequence[tuple[int, int]] | None) -> list[tuple[int, int]]:
    """Height and width of each image.

    Args:
        image, sizes: of a :class:`MultimodalBatch`; their shapes only.
    """
    return [(image.shape[2], image.shape[3])] * len(image) if sizes is None else list(sizes)


def document_lengths(documents: torch.Tensor) -> list[int]:
    """Tokens of each document of rows, one row behind the other.

    Args:
        documents: of a :class:`MultimodalBatch`, on the host.

    Example:
        >>> document_lengths(torch.tensor([[0, 0, 1], [2, 2, 2]]))
        [2, 1, 3]
    """
    if not documents.numel():
        return []
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    ends = torch.cat([begins.flatten().nonzero().flatten(), torch.tensor([documents.numel()])])
    lengths: list[int] = ends.diff().tolist()
    return lengths
