"""Cache of keys and values of computed positions, so that each further token costs one position."""

from __future__ import annotations

import torch
from torch import nn


class KeyValueCache:
    """Keys and values of each attention layer of this rank, for rows that grow by some tokens at a time.

    Args:
        capacity: the most positions of a row, including those that pad a step.

    Attributes:
        length: computed positions of each row. A caller that has run ``n`` more through the model adds ``n`` to it;
            values written behind them are padding, and the next step overwrites them.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self._kept: dict[nn.Module, torch.Tensor] = {}

    def extend(self, layer: nn.Module, keys_and_values: torch.Tensor) -> torch.Tensor:
        """Append ``[rows, heads, n, width]`` of a layer; return all of it, ``[rows, heads, length + n, width]``."""
        rows, heads, new, width = keys_and_values.shape
        if layer not in self._kept:
            self._kept[layer] = keys_and_values.new_empty(rows, heads, self.capacity, width)
        kept, end = self._kept[layer], self.length + new
        kept[:, :, self.length : end] = keys_and_values
        return kept[:, :, :end]
