"""How fast a run is: tokens per second, the share of the hardware's peak that does useful work, and memory."""

from __future__ import annotations

import resource
import sys

import torch

from energon_lite.trainer.models.config import ModelConfig

#: Dense bfloat16 matrix products of a device in FLOP/s, as its maker states; the longest name that fits counts.
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H100 PCIe": 756e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12}


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Useful floating point operations of a training step for each token: 6 N + 6 L H S.

    6 for each weight of a matrix that a token goes through (a multiplication and an addition, once forward and twice
    backward), and attention, of which a causal row needs half. What is recomputed is not counted, as it is no progress.

    Args:
        config: the model's shape.
        length: tokens of a row.

    Example:
        >>> round(flops_per_token(ModelConfig(hidden_size=64, num_layers=2, ffn_size=160, vocab_size=256), 32))
        667648
    """
    hidden, width = config.hidden_size, config.head_dim
    attention = hidden * width * (2 * config.num_heads + 2 * config.kv_heads)
    weights = config.num_layers * (attention + 3 * hidden * config.ffn_size) + hidden * config.vocab_size
    return 6.0 * weights + 6.0 * config.num_layers * hidden * length


def peak_flops(device: torch.device) -> float | None:
    """What the device could do at most; None if it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    fitting = [known for known in PEAK_FLOPS if all(word in name for word in known.split())]
    return PEAK_FLOPS[max(fitting, key=len)] if fitting else None


def memory_in_use(device: torch.device) -> float:
    """The most memory that this process has had so far, in GiB: of the GPU if it has one, else of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
