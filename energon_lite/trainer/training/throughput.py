"""Throughput of a run: tokens per second, the share of the hardware's peak that does useful work, and memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence

import torch

from energon_lite.batching import TransformerShape
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.interface import MultimodalBatch, sizes_of_images

#: Dense bfloat16 matrix throughput of a device in FLOP/s, as its maker states; the longest matching name counts.
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H100 PCIe": 756e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12}


def training_flops(config: ModelConfig, positions: float, pairs: float) -> float:
    """Return the useful operations of a training step: 6 N for each position, and 12 L H for each pair of positions.

    A position costs 6 operations for each matrix weight that it passes through (a multiplication and an addition, once
    forward and twice backward), whether it is text, image or padding, and whether the loss counts it or not. Attention
    costs are for a position and each position that it attends to. Recomputation is not counted, as it is no progress.

    Args:
        config: the model's shape.
        positions: number of positions.
        pairs: pairs of a position with itself or an earlier one that it attends to.
    """
    shape = language_shape(config)
    return float((shape.position_flops + shape.head_flops) * positions + shape.pair_flops * pairs)


def language_shape(config: ModelConfig) -> TransformerShape:
    """Return the sizes of the language model."""
    return TransformerShape(
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        ffn_size=config.ffn_size,
        kv_heads=config.kv_heads,
        head_width=config.head_width,
        vocab_size=config.vocab_size,
    )


def encoder_shape(config: ModelConfig) -> TransformerShape:
    """Return the sizes of the image encoder and projector, or of the one patch matrix. Class tokens do not count."""
    vision, pixels = config.vision, 3 * config.patch_size**2
    if vision is None:
        outer = pixels * config.hidden_size
        return TransformerShape(config.hidden_size, 0, 1, 1, gated=False, causal=False, outer_weights=outer)
    projector = (vision.hidden_size + (config.hidden_size if vision.projector == "mlp" else 0)) * config.hidden_size
    pooled = vision.pooling != "none"
    return TransformerShape(
        hidden_size=vision.hidden_size,
        num_layers=vision.used_layers,
        num_heads=vision.num_heads,
        ffn_size=vision.ffn_size,
        gated=False,
        causal=False,
        outer_weights=pixels * vision.hidden_size + (0 if pooled else projector),
        once_weights=projector if pooled else 0,
    )


def flops_of_images(config: ModelConfig, sizes: Sequence[tuple[int, int]]) -> list[int]:
    """Return the useful operations of a training step for images: encoder and projector.

    Args:
        config: the model's shape.
        sizes: height and width of each image.

    Returns:
        The operations of each image.
    """
    shape = encoder_shape(config)
    patches = [(height // config.patch_size) * (width // config.patch_size) for height, width in sizes]
    return [shape.position_flops * count + shape.pair_flops * count**2 + shape.sequence_flops for count in patches]


def batch_flops(config: ModelConfig, batch: MultimodalBatch) -> float:
    """Return :func:`training_flops` plus :func:`flops_of_images` of a micro-batch, from data on the host.

    Args:
        config: the model's shape.
        batch: the micro-batch. Nothing is read back from the device.
    """
    rows, length = batch.tokens.shape
    lengths = [length] * rows if batch.document_lengths is None else batch.document_lengths
    near = [min(tokens, config.sliding_window or tokens) for tokens in lengths]
    pairs = sum(few * (few + 1) // 2 + (tokens - few) * few for tokens, few in zip(lengths, near, strict=True))
    images = sum(flops_of_images(config, sizes_of_images(batch.image, batch.image_sizes)))
    return training_flops(config, rows * length, pairs) + images


def peak_flops(device: torch.device) -> float | None:
    """Return the peak FLOP/s of the device; None if it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    fitting = [known for known in PEAK_FLOPS if all(word in name for word in known.split())]
    return PEAK_FLOPS[max(fitting, key=len)] if fitting else None


def memory_in_use(device: torch.device) -> float:
    """Return the peak memory of this process so far, in GiB: of the GPU if it has one, else of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
