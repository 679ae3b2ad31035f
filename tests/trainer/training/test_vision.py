"""Images: where they stand, and that a row does not feel what it is batched with."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from energon_lite.batching import TokenSequence
from energon_lite.errors import FatalSampleError, UsageError
from energon_lite.trainer import (
    LlamaModel,
    ModelConfig,
    MultimodalBatch,
    MultimodalTaskEncoder,
    RowsTaskEncoder,
    VisionConfig,
    build_mesh,
)
from energon_lite.trainer.models.vision import encode_images, place_tokens

SHAPE = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, ffn_size=8, image_size=4, init_std=0.3, dtype="float64")


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
    model = LlamaModel(dataclasses.replace(SHAPE, image_size=4, patch_size=2, vision=vision), build_mesh())
    tokens, first = torch.arange(6)[None], torch.tensor([0])
    image = torch.rand(1, 3, 4, 4)
    for height, width in ((2, 4), (4, 2)):
        whole = model.all_logits(tokens, image[:, :, :height, :width], first, first)
        padded = model.all_logits(tokens, image, first, first, [(height, width)])
        torch.testing.assert_close(whole, padded, rtol=0, atol=0)


@torch.no_grad()
def test_a_row_is_what_it_would_be_alone() -> None:
    model = LlamaModel(SHAPE, build_mesh())
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(2, 3, 4, 4, generator=generator)
    tokens = torch.randint(0, 256, (3, 6), generator=generator)
    lengths, images = [6, 2, 5], {0: (1, 0), 2: (0, 1)}
    together = model.all_logits(tokens, image, torch.tensor([2, 0]), torch.tensor([1, 0]))
    for row, length in enumerate(lengths):
        number, start = images.get(row, (0, 0))
        mine = (image[number][None], torch.tensor([0]), torch.tensor([start])) if row in images else ()
        apart = model.all_logits(tokens[row : row + 1, :length], *mine)
        torch.testing.assert_close(together[row, :length], apart[0], rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_every_patch_and_its_place_count() -> None:
    model = LlamaModel(SHAPE, build_mesh())
    assert model.vision is not None
    model.vision.position.normal_(generator=torch.Generator().manual_seed(0))
    tokens, row = torch.tensor([[0, 0, 0, 0, 256, 65]]), torch.tensor([0])
    seen = []
    for patch in range(4):
        image = torch.zeros(1, 3, 4, 4)
        image[0, :, 2 * (patch // 2) :, 2 * (patch % 2) :][:, :2, :2] = 1.0
        seen.append(model.all_logits(tokens, image, row, row)[:, 4:])
    for a in range(4):
        for b in range(a):
            assert not torch.allclose(seen[a], seen[b])


@torch.no_grad()
def test_images_need_a_model_that_takes_them() -> None:
    model = LlamaModel(ModelConfig(hidden_size=16, num_layers=1, num_heads=2, ffn_size=8), build_mesh())
    with pytest.raises(UsageError, match="takes none"):
        model(torch.tensor([[1]]), torch.zeros(1, 3, 4, 4), torch.tensor([0]), torch.tensor([0]))


@pytest.mark.parametrize(
    ("row", "start", "size", "words"),
    [
        (0, 3, (4, 4), "positions 3 to 7 of row 0"),
        (2, 0, (4, 4), "row 2"),
        (0, 0, (1, 4), "1 x 4 pixels take positions"),
    ],
)
def test_an_image_that_does_not_fit_into_its_row_is_refused(
    row: int, start: int, size: tuple[int, int], words: str
) -> None:
    class Places(MultimodalTaskEncoder):
        def batch(self, samples: list[TokenSequence]) -> MultimodalBatch:
            made = super().batch(samples)
            rows, starts = torch.tensor([0, row]), torch.tensor([1, start])
            images = {"image": torch.zeros(2, 3, 4, 4), "image_sizes": [(4, 4), size]}
            return dataclasses.replace(made, image_rows=rows, image_starts=starts, **images)

    encoder = RowsTaskEncoder(Places(max_length=6, image_size=4, patch_size=2), SHAPE)
    tokens = torch.arange(6)
    sample = TokenSequence(__key__="k", __restore_key__=(), tokens=tokens, labels=tokens)
    with pytest.raises(FatalSampleError, match=words):
        encoder.encode_batch(encoder.batch([sample, sample]))
