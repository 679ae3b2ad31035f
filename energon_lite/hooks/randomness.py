"""A hook's own generator: numpy's, with Python's and torch's at its side."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np

from energon_lite.order.hashing import hash_ints

if TYPE_CHECKING:
    import torch

__all__ = ["HookGenerator", "PythonGenerator"]

#: Tags that keep the streams apart.
_PYTHON, _TORCH = 1, 2


class HookGenerator(np.random.Generator):
    """A numpy generator for a seed of 64 bits, which also has a ``random.Random`` and a ``torch.Generator``.

    Each of the three draws from a stream of its own; the other two are made when they are first asked for.

    Example:
        >>> rng = HookGenerator(7)
        >>> rng.integers(10), rng.random(3)  # numpy's
        >>> rng.random.choice(["left", "right"])  # Python's
        >>> torch.rand(3, generator=rng.torch)
    """

    def __init__(self, seed: int):
        super().__init__(np.random.Philox(key=seed))
        self._seed = seed
        self._python: PythonGenerator | None = None
        self._torch: torch.Generator | None = None

    def __reduce__(self) -> Any:
        return np.random.Generator, (self.bit_generator,)

    @property
    def numpy(self) -> np.random.Generator:
        """This one."""
        return self

    @property
    def random(self) -> PythonGenerator:
        """Python's; called, it is numpy's method of this name."""
        if self._python is None:
            self._python = PythonGenerator(hash_ints(self._seed, _PYTHON), super().random)
        return self._python

    @property
    def torch(self) -> torch.Generator:
        """Torch's, on the CPU."""
        if self._torch is None:
            import torch

            self._torch = torch.Generator()
            self._torch.manual_seed(hash_ints(self._seed, _TORCH) >> 1)
        return self._torch


class PythonGenerator(random.Random):
    """``random.Random(seed)``, which can be called like the ``random`` of a numpy generator.

    Args:
        seed: 64 bits.
        numbers: ``numpy.random.Generator.random``, which a call goes to.
    """

    def __new__(cls, seed: int, numbers: Any) -> PythonGenerator:
        return super().__new__(cls, seed)  # type: ignore[call-arg]  # object's, for mypy

    def __init__(self, seed: int, numbers: Any):
        self._numbers = numbers
        super().__init__(seed)

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        return self._numbers(*arguments, **more)
