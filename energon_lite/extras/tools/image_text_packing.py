"""Packing of images and texts into rows: a task encoder to use, or to read before writing one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from energon_lite.batching.sequence_batches import PackedBatch, TokenSequence, next_token_pairs, pack_sequences
from energon_lite.errors import SkipSample, UsageError
from energon_lite.extras.tools.positions import mrope_positions
from energon_lite.hooks import TaskEncoder, stateless
from energon_lite.samples import (
    CaptioningSample,
    InterleavedSample,
    OCRSample,
    Sample,
    TextSample,
    VQASample,
    edataclass,
)
from energon_lite.storage.samples.decoding import SampleDecoder


@edataclass
class ImageTextRow(PackedBatch):
    """A packed row of samples with images.

    In addition to the fields of all packed batches, it has the images in ``media["image"]``, the sample of each image
    in ``media_samples["image"]``, and these fields:

    Args:
        mrope_position_ids: int64 ``[3, 1, length]``: frame, row and column of each position, from 0 in each sample; see
            :func:`~energon_lite.extras.tools.positions.mrope_positions`.
        image_grids: int64 ``[images, 3]``: frames, rows and columns of each image, in positions of the row.
        image_starts: int64 ``[images]``: position in the row at which each image begins.
    """

    mrope_position_ids: torch.Tensor
    image_grids: torch.Tensor
    image_starts: torch.Tensor


@edataclass
class SelectedSamples(Sample):
    """The samples of a pack, before they become a row."""

    samples: list[TokenSequence]


class ImageTextTaskEncoder(TaskEncoder):
    """Encoder that packs samples of text and images into rows.

    A row has tokens with placeholders for images, the images, and the data by which a model separates samples and
    places images.

    The encoder packs by a plan (``batching=BestFit(Capacity(8192))``, with lengths from ``energon-lite measure``), or
    by hooks (``batch_size=1``, with ``capacity`` here). Lengths count delivered positions: placeholders included, and n
    - 1 for n tokens, since each label is the next token.

    It supports :class:`~energon_lite.CaptioningSample`, :class:`~energon_lite.InterleavedSample`,
    :class:`~energon_lite.VQASample`, :class:`~energon_lite.samples.OCRSample` and :class:`~energon_lite.TextSample`.
    The loss ignores questions and images. For other types, override ``pieces``.

    Args:
        tokenize: function from a text to its tokens.
        image_token: the placeholder token of images.
        end_token: the token after each sample, so that the shift of labels drops no placeholder.
        pad: the padding token; None: ``end_token``.
        patch: side of a patch in pixels.
        merge: side in patches of the square that the model merges into one token.
        max_image_tokens: the most tokens of an image; larger images are scaled down. None: no limit.
        capacity: tokens of a pack, for packing by hooks; None: packing by a plan.
        multiple: pad the row to the next multiple of this; the capacity gives all rows one shape.

    Example:
        >>> encoder = ImageTextTaskEncoder(tokenizer.encode, image_token=151_655, end_token=151_645)
        >>> dataset = get_train_dataset("coco", batching=BestFit(Capacity(8192)), task_encoder=encoder,
        ...                             worker_config=config)
    """

    decoder = SampleDecoder(image_decode="torchrgb")

    def __init__(
        self,
        tokenize: Callable[[str], Sequence[int]],
        *,
        image_token: int,
        end_token: int,
        pad: int | None = None,
        patch: int = 14,
        merge: int = 2,
        max_image_tokens: int | None = None,
        capacity: int | None = None,
        multiple: int = 1,
    ):
        super().__init__()
        self.tokenize = tokenize
        self.image_token = image_token
        self.end_token = end_token
        self.pad = end_token if pad is None else pad
        self.multiple = multiple
        self.token_pixels = patch * merge
        self.max_image_tokens = max_image_tokens
        self.pack_capacity = capacity

    @stateless(restore_seeds=False)
    def pieces(self, sample: Any) -> list[tuple[torch.Tensor | str, bool]]:
        """Return the images and texts of a sample in order, and whether the loss counts each.

        Raises:
            SkipSample: the sample has another type.
        """
        match sample:
            case CaptioningSample():
                return [(sample.image, False), (sample.caption, True)]
            case InterleavedSample():
                return [(piece, isinstance(piece, str)) for piece in sample.sequence]
            case VQASample() if sample.answers:
                return [(sample.image, False), (sample.context, False), (sample.answers[0], True)]
            case OCRSample():
                return [(sample.image, False), (sample.text, True)]
            case TextSample():
                return [(sample.text, True)]
        raise SkipSample(f"cannot make a row of a {type(sample).__name__}")

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> TokenSequence:
        """Make the row of one sample. Its media are ``image``, ``image_grids`` and ``image_starts``."""
        tokens: list[int] = []
        counted: list[bool] = []
        images: list[torch.Tensor] = []
        starts: list[int] = []
        for piece, counts in self.pieces(sample):
            if isinstance(piece, str):
                made = list(self.tokenize(piece))
            else:
                images.append(self._resized(piece))
                starts.append(len(tokens))
                made = [self.image_token] * math.prod(self._grid(images[-1]))
            tokens += made
            counted += [counts] * len(made)
        counted += counted[-1:]  # the end counts if the piece before it does
        if not any(counted[1:]):
            raise SkipSample("no token of it counts in the loss")
        row, labels, mask = next_token_pairs(torch.tensor([*tokens, self.end_token]), torch.tensor(counted))
        media: dict[str, Any] = {}
        if images:
            grids = torch.tensor([[1, *self._grid(image)] for image in images])
            media = {"image": images, "image_grids": grids, "image_starts": torch.tensor(starts)}
        return TokenSequence.derive_from(sample, tokens=row, labels=labels, loss_mask=mask, media=media)

    @stateless(restore_seeds=False)
    def pack_selected_samples(self, samples: list[TokenSequence]) -> SelectedSamples:
        """Collect the samples of a pack, for packing by hooks."""
        return SelectedSamples.derive_from(samples[0], samples=samples)

    @stateless(restore_seeds=False)
    def batch(self, samples: list[Any]) -> ImageTextRow:
        """Make one row of the samples of a plan, or of the packs of hooks. No samples make an empty row."""
        flat: list[TokenSequence] = []
        for sample in samples:
            flat += sample.samples if isinstance(sample, SelectedSamples) else [sample]
        row = pack_sequences(flat, pad=self.pad, multiple=self.multiple)
        media, owners = dict(row.media), dict(row.media_samples)
        none = torch.zeros(0, dtype=torch.int64)
        grids, starts = media.pop("image_grids", none.view(0, 3)), media.pop("image_starts", none)
        owner = owners.get("image", none)
        begins = row.cu_seqlens.to(torch.int64)
        assert isinstance(grids, torch.Tensor) and isinstance(starts, torch.Tensor)
        places = []
        for number, size in enumerate(begins.diff().tolist()):
            mine = owner == number  # padding at the end has no images
            places.append(mrope_positions(size, starts[mine].tolist(), grids[mine].tolist()))
        return ImageTextRow.extend(
            row,
            media={name: items for name, items in media.items() if name == "image"},
            media_samples={name: items for name, items in owners.items() if name == "image"},
            mrope_position_ids=torch.cat([none.view(0).expand(3, 0), *places], dim=1)[:, None],
            image_grids=grids,
            image_starts=starts + begins[owner],
        )

    @stateless(restore_seeds=False)
    def empty_batch(self, like: Any, rows: int) -> ImageTextRow:
        """Make a row for a rank without samples."""
        return self.batch([])

    def _grid(self, image: torch.Tensor) -> tuple[int, int]:
        """Return rows and columns of an image, in tokens."""
        return image.shape[-2] // self.token_pixels, image.shape[-1] // self.token_pixels

    def _resized(self, image: torch.Tensor) -> torch.Tensor:
        """Resize an image to sides of whole tokens, within the limit, about keeping its proportions."""
        if image.dim() != 3 or min(image.shape) < 1:
            raise UsageError(f"an image of shape {list(image.shape)}", fix="give [channels, height, width]")
        sides = [size / self.token_pixels for size in image.shape[-2:]]
        most = self.max_image_tokens
        if most is not None and math.prod(max(1, round(side)) for side in sides) > most:
            shrink = math.sqrt(most / math.prod(sides))
            sides = [max(1, math.floor(side * shrink)) for side in sides]
            sides = [min(side, most // min(sides)) for side in sides]  # if the shorter side was raised to one token
        size = tuple(max(1, round(side)) * self.token_pixels for side in sides)
        if tuple(image.shape[-2:]) == size:
            return image
        return F.interpolate(image[None], size=size, mode="bilinear", antialias=True)[0].clamp(0.0, 1.0)
