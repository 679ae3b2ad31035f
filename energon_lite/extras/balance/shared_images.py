"""Exchange of images between data-parallel ranks, so that all encode equal work, forward and backward.

Micro-batches are grouped by tokens, so ranks have images of different sizes and numbers. The encoder can process any
rank's images: in each turn (one micro-batch for each rank), :class:`EncoderPlan` assigns each image to a rank. Pixels
are sent to that rank and the tokens are sent back, an all-to-all there and back; in the backward pass the gradients
take the same ways in reverse. The result of a step does not change.

The plan is computed from the images of the turn, equally on every rank, so no communication is needed to agree on it.
But every rank must know the sizes of all images of the step: the ranks exchange them once, in a small message. They do
not take them from the plan of the data, because a sample that failed would be missing there.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from energon_lite.batching.capacity import Ints
from energon_lite.errors import TopologyError, UsageError

if TYPE_CHECKING:
    from energon_lite.trainer.models.config import ModelConfig
    from energon_lite.trainer.models.interface import MultimodalBatch
    from energon_lite.trainer.models.llama import LlamaModel

#: Tolerance: a rank may exceed its share by this fraction (1/50) before an image is sent away.
_WORTH = 50
#: Operations per unit of cost, so that sums of costs fit into 64 bits.
_OPERATIONS = 1 << 10

Sizes = list[tuple[int, int]]


@dataclass(frozen=True)
class EncoderPlan:
    """Assignment of the images of one turn to encoding ranks.

    Args:
        owner: the rank whose micro-batch has the image, ascending, ``[images]``.
        encoder: the rank that encodes it, ``[images]``.
        ranks: number of ranks.

    Example:
        >>> plan = EncoderPlan.of(owner=np.array([0, 0, 0, 1]), costs=np.array([4, 9, 5, 1]), ranks=2)
        >>> plan.encoder.tolist(), plan.send(0), plan.receive(1)
        ([1, 0, 1, 1], [[1], [0, 2]], [2, 1])
        >>> plan.encoded(1), plan.give_back(1), plan.order_back(0)
        ([0, 2, 3], [[0, 1], [2]], [1, 0, 2])
    """

    owner: Ints
    encoder: Ints
    ranks: int

    @classmethod
    def of(cls, owner: Ints, costs: Ints, ranks: int) -> EncoderPlan:
        """Balance the encoding work with as few transfers as possible, by a greedy heuristic.

        Images are placed by descending cost: each stays on its rank while that rank is below its share; otherwise it
        goes to the least loaded rank.

        Args:
            owner: the rank whose micro-batch has the image, ascending, ``[images]``.
            costs: cost of encoding each image, integers ``[images]``.
            ranks: number of ranks.

        Raises:
            TopologyError: an owner is not a valid rank, or owners do not ascend.
            UsageError: costs are not integers, are negative, or do not match the images.
        """
        owner = np.asarray(owner, dtype=np.int64)
        if len(owner) and (owner.min() < 0 or owner.max() >= ranks or (np.diff(owner) < 0).any()):
            raise TopologyError(
                f"images of ranks {int(owner.min())} to {int(owner.max())}, of {ranks}",
                fix="give the rank of each image, 0 first",
            )
        costs = np.asarray(costs)
        if costs.shape != owner.shape or (len(costs) and (costs.dtype.kind not in "iu" or costs.min() < 0)):
            raise UsageError(
                f"costs are {costs.dtype}{list(costs.shape)} for {len(owner)} images",
                fix="give an integer of 0 or more for each image",
            )
        costs = costs.astype(np.int64)
        share = -(-int(costs.sum()) // max(1, ranks))
        allowed = max(share, int(costs.max(initial=0)))
        allowed += allowed // _WORTH
        encoder = owner.copy()
        loads = [0] * ranks
        left = []
        order = np.argsort(-costs, kind="stable").tolist()
        for image in order:
            mine, cost = int(owner[image]), int(costs[image])
            if loads[mine] + cost <= allowed:
                loads[mine] += cost
            else:
                left.append(image)
        heap = [(load, rank) for rank, load in enumerate(loads)]
        heapq.heapify(heap)
        for image in left:
            load, rank = heapq.heappop(heap)
            encoder[image] = rank
            heapq.heappush(heap, (load + int(costs[image]), rank))
        return cls(owner, encoder, ranks)

    def loads(self, costs: Ints) -> Ints:
        """Encoding cost of each rank, ``[ranks]``."""
        loads = np.zeros(self.ranks, dtype=np.int64)
        np.add.at(loads, self.encoder, costs)
        return loads

    def send(self, rank: int) -> list[list[int]]:
        """Images that this rank sends to each rank, numbered as in its micro-batch.

        Images that it encodes itself are in the list for its own rank.
        """
        mine = self.encoder[slice(*np.searchsorted(self.owner, [rank, rank + 1]).tolist())]
        return [np.flatnonzero(mine == to).tolist() for to in range(self.ranks)]

    def receive(self, rank: int) -> list[int]:
        """Number of images that this rank gets from each rank, itself included."""
        return np.bincount(self.owner[self.encoder == rank], minlength=self.ranks).tolist()

    def encoded(self, rank: int) -> list[int]:
        """Images that this rank encodes, numbered over all ranks, in order of arrival."""
        return np.flatnonzero(self.encoder == rank).tolist()

    def give_back(self, rank: int) -> list[list[int]]:
        """Encoded images that this rank returns to each rank, numbered in order of arrival."""
        ends = np.cumsum([0, *self.receive(rank)]).tolist()
        return [list(range(first, stop)) for first, stop in pairwise(ends)]

    def order_back(self, rank: int) -> list[int]:
        """Permutation that brings returned images into this rank's own order: index of each among the returned ones."""
        sent = [image for images in self.send(rank) for image in images]
        return np.argsort(np.array(sent, dtype=np.int64), kind="stable").tolist()


def image_exchange(model: LlamaModel, micro_batches: Sequence[MultimodalBatch | None]) -> ImageExchange | None:
    """Return the exchange of a step's images; None if each rank encodes its own. Every rank must call it.

    Args:
        model: the model, on a mesh with ``share_images``.
        micro_batches: this rank's micro-batches of the step.
    """
    from energon_lite.trainer.models.interface import sizes_of_images

    group = model.mesh.group("images")
    if group is None or model.vision is None:
        return None
    own: list[Sizes] = []
    for batch in micro_batches:
        assert batch is not None, "the first stage needs its micro-batches"
        own.append(sizes_of_images(batch.image, batch.image_sizes))
    by_rank = [own] * group.size()
    dist.all_gather_object(by_rank, own, group=group)
    return ImageExchange(model, [*zip(*by_rank, strict=True)], group)


class ImageExchange:
    """Encoder of a model's first stage that shares images between ranks, micro-batch after micro-batch.

    Args:
        model: the model whose encoder and projector are used.
        sizes: height and width of each image, by turn and rank.
        group: the ranks.
    """

    def __init__(self, model: LlamaModel, sizes: Sequence[Sequence[Sizes]], group: dist.ProcessGroup):
        assert model.vision is not None
        self._encoder = model.vision
        self._projector = model.projector
        self._config = model.config
        self._sizes = sizes
        self._group = group
        self._rank = group.rank()
        self._turn = 0

    def __call__(self, image: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Encode the images of this rank's next micro-batch. All ranks must call it, with or without images.

        Args:
            image: ``[images, 3, height, width]``, see :class:`MultimodalBatch`.

        Returns:
            The tokens of all images, concatenated, ``[tokens, hidden]``; and the number of tokens of each.
        """
        sizes = self._sizes[self._turn]
        rank = self._rank
        config = self._config
        self._turn += 1
        costs, owner = _costs(config, sizes)
        plan = EncoderPlan.of(owner, costs, len(sizes))
        flat = [size for of_rank in sizes for size in of_rank]
        own, mine = sizes[rank], plan.encoded(rank)
        # Image numbers from and to each rank, in the order of transfer.
        to, came = plan.send(rank), np.split(np.array(mine, dtype=np.int64), np.cumsum(plan.receive(rank))[:-1])
        pixels = [image[i, :, : own[i][0], : own[i][1]].reshape(-1) for images in to for i in images]
        sent = [sum(3 * own[i][0] * own[i][1] for i in images) for images in to]
        received = [sum(3 * flat[i][0] * flat[i][1] for i in images.tolist()) for images in came]
        there = _Exchange.apply(torch.cat([image.new_zeros(0), *pixels]), sent, received, self._group)
        made = self._encode(there, [flat[i] for i in mine])
        width, tokens = config.hidden_size, [config.image_tokens(*size) for size in flat]
        given = [width * sum(tokens[i] for i in images.tolist()) for images in came]
        count = [config.image_tokens(*size) for size in own]
        taken = [width * sum(count[i] for i in images) for images in to]
        back = _Exchange.apply(made.reshape(-1), given, taken, self._group).view(-1, width)
        order = plan.order_back(rank)
        pieces = back.split([count[i] for images in to for i in images])
        return torch.cat([back[:0], *(pieces[place] for place in order)]), count

    def _encode(self, pixels: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """Encode concatenated images into tokens ``[tokens, hidden]``."""
        from energon_lite.trainer.models.vision import encode_images

        images = pixels.split([3 * height * width for height, width in sizes])
        if sizes:
            shaped = [pixels.view(3, *size) for pixels, size in zip(images, sizes, strict=True)]
            return encode_images(shaped, self._encoder, self._projector)[0]
        # Without images this rank must still take part in the backward exchange, because the other ranks wait for it.
        parts = [part for part in (self._encoder, self._projector) if part is not None]
        learned = [p for part in parts for p in part.parameters() if p.requires_grad]
        nothing = pixels.new_zeros(0, self._config.hidden_size, dtype=self._config.torch_dtype)
        return learned[0].reshape(-1)[:0].view(0, self._config.hidden_size) if learned else nothing


class _Exchange(torch.autograd.Function):
    """All-to-all exchange of flat tensors; gradients travel in reverse."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(x: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    made = x.new_empty(sum(received))
    dist.all_to_all_single(made, x.contiguous(), received, sent, group=group)
    return made


def _costs(config: ModelConfig, sizes: Sequence[Sizes]) -> tuple[Ints, Ints]:
    """Return the cost and the owner, a rank, of each image of a turn, ``[images]``."""
    from energon_lite.trainer.training.throughput import flops_of_images

    flops = flops_of_images(config, [size for of_rank in sizes for size in of_rank])
    costs = [1 + count // _OPERATIONS for count in flops]
    owner = np.repeat(np.arange(len(sizes)), [len(of_rank) for of_rank in sizes])
    return np.array(costs, dtype=np.int64), owner
