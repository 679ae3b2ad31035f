"""Tokens, rows and batches, and where images stand in them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from energon_lite import CaptioningSample, ImageSample, SkipSample, TextSample
from energon_lite.batching import TokenSequence
from energon_lite.errors import UsageError
from energon_lite.hooks import HookContext, hook_context
from energon_lite.trainer import (
    ByteTokenizer,
    LlamaModel,
    ModelConfig,
    MultimodalBatch,
    MultimodalTaskEncoder,
    VisionConfig,
    build_mesh,
    resize_image,
)
from energon_lite.trainer.models.vision import encode_images, place_tokens

BASE: dict[str, Any] = {"__key__": "k", "__restore_key__": ("sample", 0, 0, 0, 0)}
BOS, EOS, PAD = ByteTokenizer.bos, ByteTokenizer.eos, ByteTokenizer.pad


def encoder(training: bool = True) -> MultimodalTaskEncoder:
    return MultimodalTaskEncoder(max_length=4, image_size=2, patch_size=1, training=training)


def text(value: str) -> TextSample:
    return TextSample(**BASE, text=value)


def encoded(sample: Any, *, training: bool = True, seed: int = 0) -> TokenSequence:
    with hook_context(HookContext(seed)):
        return encoder(training).encode_sample(sample)


def test_broken_utf8_is_marked() -> None:
    assert ByteTokenizer().decode([BOS, 0xC3, EOS]) == "\ufffd"


def test_a_long_text_gives_a_window_of_its_own_choice() -> None:
    """And in an evaluation the first one."""
    whole = ByteTokenizer().encode("abcdefghij")
    seen = set()
    for seed in range(60):
        row = encoded(text("abcdefghij"), seed=seed)
        again = encoded(text("abcdefghij"), seed=seed)
        assert torch.equal(row.tokens, again.tokens), "the same sample has the same window"
        window = [*row.tokens.tolist(), row.labels[-1].item()]
        start = next(i for i in range(len(whole)) if whole[i : i + 5] == window)
        seen.add(start)
    assert seen == set(range(8)), "every window occurs, the first and the last too"
    assert encoded(text("abcdefghij"), training=False).tokens.tolist() == [BOS, 97, 98, 99]


def test_what_makes_no_row_is_skipped_with_a_reason() -> None:
    with pytest.raises(SkipSample, match="a ImageSample"):
        encoder().encode_sample(ImageSample(**BASE, image=torch.rand(3, 2, 2)))


def test_rows_have_the_next_tokens_as_labels_and_are_cut_and_padded_at_the_end() -> None:
    """A caption stands behind its image, which is brought to size."""
    caption = CaptioningSample(**BASE, image=torch.full((3, 4, 4), 0.5), caption="abcdef")
    rows = [encoded(text("")), encoded(caption), encoded(text("xy"))]
    assert [row.loss_mask is None and row.media is None for row in rows] == [True, False, True]
    batch = encoder().batch(rows)
    places, rest = [PAD] * 4, [PAD] * 5
    assert batch.tokens.tolist() == [[BOS, *places, *places[1:]], [*places, BOS, 97, 98, 99], [BOS, 120, 121, *rest]]
    labels = [[EOS, *places, *places[1:]], [*places[1:], BOS, 97, 98, 99, 100], [120, 121, EOS, *rest]]
    assert batch.labels.tolist() == labels
    assert batch.loss_mask.tolist() == [[1] + [0] * 7, [0] * 4 + [1] * 4, [1] * 3 + [0] * 5]
    assert torch.equal(batch.image, torch.full((1, 3, 2, 2), 0.5))
    assert batch.image_rows.tolist() == [1] and batch.image_starts.tolist() == [0] and batch.documents is None
    assert batch.__key__ == ["k", "k", "k"]
    assert (batch.tokens.dtype, batch.labels.dtype, batch.image_rows.dtype) == (torch.int64,) * 3
    assert batch.loss_mask.dtype == batch.image.dtype == torch.float32


def test_a_pooled_image_is_one_token_of_its_own() -> None:
    rows = MultimodalTaskEncoder(max_length=4, image_size=2, pooled=True, image_token=7)
    with hook_context(HookContext(0)):
        row = rows.encode_sample(CaptioningSample(**BASE, image=torch.rand(3, 4, 4), caption="ab"))
    assert row.tokens.tolist() == [7, BOS, 97, 98]


def test_a_batch_may_be_empty() -> None:
    full = encoder().batch([encoded(text("a"))])
    packing = MultimodalTaskEncoder(max_length=4, image_size=2, packed=True)
    for batch in (encoder().batch([]), encoder().empty_batch(full, 1), packing.batch([])):
        assert isinstance(batch, MultimodalBatch)
        assert batch.tokens.shape == batch.labels.shape == batch.loss_mask.shape == (0, 0)
        assert batch.image.shape == (0, 3, 2, 2) and batch.image_rows.shape == (0,)
        assert batch.__key__ == []


def test_images_are_brought_to_size() -> None:
    image = torch.rand(3, 8, 8)
    assert resize_image(image, 8) is image
    small = resize_image(image, 4)
    assert small.shape == (3, 4, 4) and small.min() >= 0 and small.max() <= 1
    torch.testing.assert_close(resize_image(torch.full((3, 5, 9), 0.25), 4), torch.full((3, 4, 4), 0.25))


# -- images in the model ----------------------------------------------------------------------------------------------

SHAPE = ModelConfig(hidden_size=16, num_layers=1, num_heads=2, ffn_size=8)
SEES = dataclasses.replace(SHAPE, image_size=4, patch_size=2)


class Pixels(torch.nn.Module):
    """Each pixel is a token."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.flatten(1)[..., None]


def test_images_take_as_many_places_as_they_need_where_tokens_keep_them() -> None:
    text = torch.tensor([[0.0, 0, 0, 0, 0, 0, 0], [21, 0, 0, 22, 23, 24, 25], [31, 32, 33, 34, 35, 36, 37]])[..., None]
    image = torch.arange(1.0, 17.0).view(4, 1, 2, 2)
    sizes = [(1, 1), (2, 2), (1, 2), (1, 1)]
    rows, starts = torch.tensor([0, 0, 1, 0]), torch.tensor([6, 1, 1, 0])
    images = [one[:, :height, :width] for one, (height, width) in zip(image, sizes, strict=True)]
    placed = place_tokens(text, *encode_images(images, Pixels(), None), rows, starts).squeeze(-1)
    assert placed.tolist() == [[13, 5, 6, 7, 8, 0, 1], [21, 9, 10, 22, 23, 24, 25], [31, 32, 33, 34, 35, 36, 37]]


@torch.no_grad()
def test_without_sizes_images_fill_their_tensor() -> None:
    vision = VisionConfig(hidden_size=8, num_layers=1, num_heads=2, ffn_size=12)
    model = LlamaModel(dataclasses.replace(SEES, vision=vision, init_std=0.3, dtype="float64"), build_mesh())
    tokens, first = torch.arange(6)[None], torch.tensor([0])
    image = torch.rand(1, 3, 4, 4)
    for height, width in ((2, 4), (4, 2)):
        whole = model.all_logits(tokens, image[:, :, :height, :width], first, first)
        padded = model.all_logits(tokens, image, first, first, [(height, width)])
        torch.testing.assert_close(whole, padded, rtol=0, atol=0)


@torch.no_grad()
def test_images_need_a_model_that_takes_them() -> None:
    model = LlamaModel(SHAPE, build_mesh())
    with pytest.raises(UsageError, match="takes none"):
        model(torch.tensor([[1]]), torch.zeros(1, 3, 4, 4), torch.tensor([0]), torch.tensor([0]))
