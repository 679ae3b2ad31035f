"""Random generator of a hook: numpy's, extended by Python's and torch's."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np

from energon_lite.order.hashing import hash_ints

if TYPE_CHECKING:
    import torch

__all__ = ["HookGenerator", "PythonGenerator"]

#: Tag of Python's stream, which keeps the streams apart.
_PYTHON = 1
#: Tag of torch's stream.
_TORCH = 2


class HookGenerator(np.random.Generator):
    """Numpy generator with a seed of 64 bits, which also has a ``random.Random`` and a ``torch.Generator``.

    Each of the three draws from a stream of its own; the other two are made on first use.

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
        """The generator itself."""
        return self

    @property
    def random(self) -> PythonGenerator:
        """Python's generator; called, it acts as numpy's method of this name."""
        if self._python is None:
            self._python = PythonGenerator(hash_ints(self._seed, _PYTHON), super().random)
        return self._python

    @property
    def torch(self) -> torch.Generator:
        """Torch's generator, on the CPU."""
        if self._torch is None:
            import torch

            self._torch = torch.Generator()
            self._torch.manual_seed(hash_ints(self._seed, _TORCH) >> 1)
        return self._torch


class PythonGenerator(random.Random):
    """A ``random.Random`` with a seed, which can also be called like the ``random`` method of a numpy generator.

    Args:
        seed: 64 bits.
        numbers: ``numpy.random.Generator.random``, to which calls are forwarded.
    """

    def __new__(cls, seed: int, numbers: Any) -> PythonGenerator:
        return super().__new__(cls, seed)  # type: ignore[call-arg]  # object's, for mypy

    def __init__(self, seed: int, numbers: Any):
        self._numbers = numbers
        super().__init__(seed)

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        return self._numbers(*arguments, **more)
