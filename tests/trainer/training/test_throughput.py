"""The arithmetic of throughput."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from energon_lite.trainer import LlamaModel, ModelConfig, MultimodalBatch, VisionConfig, build_mesh
from energon_lite.trainer.models.batch import document_lengths
from energon_lite.trainer.training.throughput import (
    batch_flops,
    flops_of_images,
    memory_in_use,
    peak_flops,
    training_flops,
)

SHAPE = ModelConfig(hidden_size=64, num_layers=3, num_heads=8, num_kv_heads=2, ffn_size=80, vocab_size=96)


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Operations of each token of a long causal row: 6 N + 6 L H S."""
    return training_flops(config, 1, length / 2)


def test_weights_that_a_token_is_multiplied_with_and_the_length_of_its_row_count() -> None:
    model = LlamaModel(SHAPE, build_mesh())
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    padding = (SHAPE.padded_vocab_size - SHAPE.vocab_size) * SHAPE.hidden_size
    assert flops_per_token(SHAPE, 0) == 6 * (matrices - padding)
    assert flops_per_token(SHAPE, 100) - flops_per_token(SHAPE, 0) == 6 * 3 * 64 * 100
    # What a long row has for each of its tokens, but for the half of a pair with itself.
    assert training_flops(SHAPE, 100, 100 * 101 / 2) == pytest.approx(100 * flops_per_token(SHAPE, 101))


def test_peaks_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200", "Some other"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        found[name] = peak_flops(torch.device("cuda", 0))
    assert list(found.values()) == [989e12, 756e12, 989e12, None]
    assert peak_flops(torch.device("cpu")) is None


def test_memory_of_this_process() -> None:
    assert 0.01 < memory_in_use(torch.device("cpu")) < 1000


@pytest.mark.parametrize("projector", ["mlp", "linear"])
def test_images_go_through_the_encoders_matrices(projector: str) -> None:
    vision = VisionConfig(hidden_size=12, num_layers=3, num_heads=2, ffn_size=20, feature_layer=-2, projector=projector)
    config = dataclasses.replace(SHAPE, image_size=8, patch_size=2, vision=vision)
    model = LlamaModel(config, build_mesh())
    used = [
        p for name, p in model.named_parameters() if name.startswith(("vision.", "projector.")) and ".2." not in name
    ]
    matrices = sum(p.numel() for p in used if p.dim() > 1) - model.vision.embeddings.position_embedding.weight.numel()
    assert flops_of_images(config, [(8, 8)] * 3) == [6 * 16 * matrices + 12 * 2 * 12 * 16**2] * 3
    assert sum(flops_of_images(config, [(8, 4), (5, 4)])) == 6 * 12 * matrices + 12 * 2 * 12 * (8**2 + 4**2)
    plain = dataclasses.replace(config, vision=None)
    assert flops_of_images(plain, [(8, 8)]) == [6 * 16 * 12 * SHAPE.hidden_size]
    assert flops_of_images(SHAPE, []) == []


def test_a_micro_batch_costs_what_its_rows_and_images_do() -> None:
    config = dataclasses.replace(SHAPE, image_size=8, patch_size=2)
    zeros = torch.zeros(2, 6, dtype=torch.int64)
    images = {"image": torch.zeros(1, 3, 8, 8), "image_rows": zeros[0, :1], "image_starts": zeros[0, :1]}
    batch = MultimodalBatch(tokens=zeros, labels=zeros, loss_mask=zeros, **images)
    (of_image,) = flops_of_images(config, [(8, 8)])
    assert batch_flops(config, batch) == training_flops(config, 12, 2 * 21) + of_image
    batch.documents = torch.tensor([[0, 0, 1, 1, 1, 2], [4, 4, 4, 4, 4, 4]])
    batch.document_lengths = document_lengths(batch.documents)
    assert batch.document_lengths == [2, 3, 1, 6] and document_lengths(batch.documents[:0]) == []
    assert batch_flops(config, batch) == training_flops(config, 12, 31) + of_image
