"""Image prefixes: where they stand, and that a row does not feel what it is batched with."""

from __future__ import annotations

import pytest
import torch

from energon_lite.errors import UsageError
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.training.config import ModelConfig
from energon_lite.trainer.training.llama import LlamaModel
from energon_lite.trainer.training.vision import put_prefix, take_text

SHAPE = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, ffn_size=8, image_size=4, init_std=0.3, dtype="float64")
NO_IMAGES = torch.zeros(0, 3, 4, 4), torch.zeros(0, dtype=torch.int64)


def test_prefixes_stand_before_their_rows_and_others_stay_flush_left() -> None:
    text = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).unsqueeze(-1)
    prefix = torch.tensor([[70.0, 71.0, 72.0], [80.0, 81.0, 82.0]]).unsqueeze(-1)
    placed, has_image = put_prefix(text, prefix, torch.tensor([2, 0]))
    assert placed.squeeze(-1).tolist() == [[80, 81, 82, 1, 2], [3, 4, 0, 0, 0], [70, 71, 72, 5, 6]]
    assert has_image.tolist() == [True, False, True]
    assert torch.equal(take_text(placed, has_image, 3), text)


@torch.no_grad()
def test_a_row_is_what_it_would_be_alone(alone: ParallelMesh) -> None:
    model = LlamaModel(SHAPE, alone)
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(2, 3, 4, 4, generator=generator)
    tokens = torch.randint(0, 256, (3, 6), generator=generator)
    lengths, images = [6, 2, 4], {0: 1, 2: 0}
    together = model.all_logits(tokens, image, torch.tensor([2, 0]))
    for row, length in enumerate(lengths):
        mine = (image[images[row]][None], torch.tensor([0])) if row in images else NO_IMAGES
        apart = model.all_logits(tokens[row : row + 1, :length], *mine)
        torch.testing.assert_close(together[row, :length], apart[0], rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_every_patch_and_its_place_count(alone: ParallelMesh) -> None:
    model = LlamaModel(SHAPE, alone)
    assert model.vision is not None
    model.vision.position.normal_(generator=torch.Generator().manual_seed(0))
    tokens, row = torch.tensor([[256, 65]]), torch.tensor([0])
    seen = []
    for patch in range(4):
        image = torch.zeros(1, 3, 4, 4)
        image[0, :, 2 * (patch // 2) :, 2 * (patch % 2) :][:, :2, :2] = 1.0
        seen.append(model.all_logits(tokens, image, row))
    for a in range(4):
        for b in range(a):
            assert not torch.allclose(seen[a], seen[b])


@torch.no_grad()
def test_images_need_a_model_that_takes_them(alone: ParallelMesh) -> None:
    model = LlamaModel(ModelConfig(hidden_size=16, num_layers=1, num_heads=2, ffn_size=8), alone)
    with pytest.raises(UsageError, match="takes none"):
        model(torch.tensor([[1]]), torch.zeros(1, 3, 4, 4), torch.tensor([0]))
