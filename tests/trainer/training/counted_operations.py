"""Counting of the operations that are launched, by their names and the shapes of their results."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """A list of all operations within the block: name, and shape of the result if it is a tensor.

    What is computed is counted: what is taken from a cache does not get here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.found.append((str(func), tuple(made.shape) if isinstance(made, torch.Tensor) else ()))
        return made

    def count(self) -> Counter[str]:
        """How often each was launched, by its name alone: ``mm`` for ``aten.mm.default``."""
        return Counter(name.split(".")[1] for name, _ in self.found)
