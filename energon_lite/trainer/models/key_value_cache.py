"""Keys and values of positions that have been computed, so that each further token costs one position."""

from __future__ import annotations

import torch
from torch import nn


class KeyValueCache:
    """The keys and values of each attention layer of this rank, for rows that grow by some tokens at a time.

    Args:
        capacity: positions that a row may have at most, those that pad a step included.

    Attributes:
        length: positions of each row that are computed. Who has sent ``n`` more through the model adds ``n`` to it;
            what a step wrote behind them is padding, and the next step writes over it.
    """

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self._kept: dict[nn.Module, torch.Tensor] = {}

    def extend(self, layer: nn.Module, keys_and_values: torch.Tensor) -> torch.Tensor:
        """Keep ``[rows, heads, n, width]`` behind what a layer has; all of it, ``[rows, heads, length + n, width]``."""
        rows, heads, new, width = keys_and_values.shape
        if layer not in self._kept:
            self._kept[layer] = keys_and_values.new_empty(rows, heads, self.capacity, width)
        kept, end = self._kept[layer], self.length + new
        kept[:, :, self.length : end] = keys_and_values
        return kept[:, :, :end]
