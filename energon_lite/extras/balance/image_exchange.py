"""Exchange of images between data-parallel ranks, so that all encode equal work, forward and backward.

Data-parallel ranks have images of different sizes and numbers, however their tokens are balanced. In each turn, the
:class:`~energon_lite.extras.balance.EncoderPlan` assigns each image to a rank. Pixels are sent to that rank and the
tokens are sent back; in the backward pass the gradients take the same ways in reverse. The result of a step does not
change.

Every rank must know the sizes of all images of the step. The ranks exchange them once, in a small message. They do not
take them from the plan of the data, because a sample that failed would be missing there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from energon_lite.extras.balance.encoder_plan import EncoderPlan

if TYPE_CHECKING:
    from energon_lite.trainer.models.batch import MultimodalBatch
    from energon_lite.trainer.models.config import ModelConfig
    from energon_lite.trainer.models.llama import LlamaModel

#: Operations per unit of cost, so that sums of costs fit into 64 bits.
_OPERATIONS = 1 << 10

Sizes = list[tuple[int, int]]


def image_exchange(model: LlamaModel, micro_batches: Sequence[MultimodalBatch | None]) -> ImageExchange | None:
    """Return the exchange of a step's images; None if each rank encodes its own. Every rank must call it.

    Args:
        model: the model, on a mesh with ``share_images``.
        micro_batches: this rank's micro-batches of the step.
    """
    from energon_lite.trainer.models.batch import sizes_of_images

    group = model.mesh.group("images")
    if group is None or model.vision is None:
        return None
    own: list[Sizes] = []
    for batch in micro_batches:
        assert batch is not None, "the first stage needs its micro-batches"
        own.append(sizes_of_images(batch.image, batch.image_sizes))
    return ImageExchange(model, _all_sizes(own, group), group)


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
        there = _Exchange.apply(_joined(pixels, image.new_zeros(0)), sent, received, self._group)
        made = self._encode(there, [flat[i] for i in mine])
        width, tokens = config.hidden_size, [config.image_tokens(*size) for size in flat]
        given = [width * sum(tokens[i] for i in images.tolist()) for images in came]
        count = [config.image_tokens(*size) for size in own]
        taken = [width * sum(count[i] for i in images) for images in to]
        back = _Exchange.apply(made.reshape(-1), given, taken, self._group).view(-1, width)
        order = plan.order_back(rank)
        pieces = back.split([count[i] for images in to for i in images])
        return _joined([pieces[place] for place in order], back), count

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


def _joined(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat(list(parts)) if parts else like[:0]


def _costs(config: ModelConfig, sizes: Sequence[Sizes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the cost and the owner, a rank, of each image of a turn, ``[images]``."""
    from energon_lite.trainer.training.throughput import flops_of_images

    flops = flops_of_images(config, [size for of_rank in sizes for size in of_rank])
    costs = [1 + count // _OPERATIONS for count in flops]
    owner = np.repeat(np.arange(len(sizes)), [len(of_rank) for of_rank in sizes])
    return np.array(costs, dtype=np.int64), owner


def _all_sizes(own: list[Sizes], group: dist.ProcessGroup) -> list[tuple[Sizes, ...]]:
    """Return the sizes of all images, by turn and rank."""
    by_rank = [own] * group.size()
    dist.all_gather_object(by_rank, own, group=group)
    return list(zip(*by_rank, strict=True))
