"""Energon's random number generators, for other people's wrappers. Hooks use ``self.rng`` instead."""

from __future__ import annotations

import random
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from energon_lite.order.hashing import hash_ints, hash_text
from energon_lite.worker_config import WorkerConfig

__all__ = ["SystemRng", "SystemRngState", "WorkerRng"]

T = TypeVar("T")


class SystemRngState(NamedTuple):
    """States of the three generators."""

    torch: Any
    numpy: Any
    random: Any


class SystemRng:
    """Seeding and states of the global generators of Python, numpy and torch, together."""

    @staticmethod
    def seed(seed: int) -> None:
        """Seed the three generators."""
        torch.manual_seed(seed)
        np.random.seed(seed % (1 << 32))
        random.seed(seed)

    @staticmethod
    def save_state() -> SystemRngState:
        """Return the states of all three."""
        return SystemRngState(torch.get_rng_state(), np.random.get_state(), random.getstate())

    @staticmethod
    def restore_state(state: SystemRngState) -> None:
        """Restore the states of all three."""
        torch.set_rng_state(state.torch)
        np.random.set_state(state.numpy)
        random.setstate(state.random)

    @staticmethod
    def get_seed_from_args(*args: Any) -> int:
        """Return a 32-bit seed computed from the text of the arguments."""
        return hash_ints(*(hash_text(str(argument)) for argument in args)) & 0xFFFFFFFF

    @staticmethod
    def seed_args(*args: Any) -> None:
        """Seed all three from arguments."""
        SystemRng.seed(SystemRng.get_seed_from_args(*args))


class WorkerRng:
    """Random generator of this worker.

    Args:
        worker_config: configuration whose :meth:`~energon_lite.WorkerConfig.worker_seed` seeds it.
    """

    def __init__(self, worker_config: WorkerConfig):
        self.worker_config = worker_config
        self._rng: torch.Generator | None = None

    @property
    def rng(self) -> torch.Generator:
        """The generator, made on first access."""
        if self._rng is None:
            self._rng = torch.Generator()
            self._rng.manual_seed(self.worker_config.worker_seed())
        return self._rng

    def randbelow(self, n: int) -> int:
        """Return a random number from 0 to n - 1."""
        return int(torch.randint(0, n, (), generator=self.rng))

    def choice_idx(self, probs: torch.Tensor) -> int:
        """Return a random index with probabilities proportional to ``probs``."""
        return int(torch.multinomial(probs.double(), 1, generator=self.rng))

    def choice(self, l: list[T], probs: torch.Tensor | None = None) -> T:  # noqa: E741  # Energon's name for it
        """Return a random entry of a list."""
        return l[self.randbelow(len(l)) if probs is None else self.choice_idx(probs)]

    def shuffle(self, l: list[T]) -> list[T]:  # noqa: E741
        """Return the entries in random order."""
        return [l[place] for place in torch.randperm(len(l), generator=self.rng).tolist()]

    def rand_pop(self, l: list[T]) -> T:  # noqa: E741
        """Remove a random entry from the list and return it."""
        return l.pop(self.randbelow(len(l)))

    def save_state(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {"rng": bytes(self.rng.get_state().tolist())}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self._rng = torch.Generator()
        self._rng.set_state(torch.frombuffer(bytearray(state["rng"]), dtype=torch.uint8).clone())
