"""Generators of random numbers, for wrappers that other people wrote. Hooks here have ``self.rng``."""

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
    """Where the three are."""

    torch: Any
    numpy: Any
    random: Any


class SystemRng:
    """The global generators of Python, numpy and torch, together."""

    @staticmethod
    def seed(seed: int) -> None:
        """Seed all three."""
        torch.manual_seed(seed)
        np.random.seed(seed % (1 << 32))
        random.seed(seed)

    @staticmethod
    def save_state() -> SystemRngState:
        """Where they are."""
        return SystemRngState(torch.get_rng_state(), np.random.get_state(), random.getstate())

    @staticmethod
    def restore_state(state: SystemRngState) -> None:
        """Go back to where they were."""
        torch.set_rng_state(state.torch)
        np.random.set_state(state.numpy)
        random.setstate(state.random)

    @staticmethod
    def get_seed_from_args(*args: Any) -> int:
        """32 bits that are a function of what the arguments look like."""
        return hash_ints(*(hash_text(str(one)) for one in args)) & 0xFFFFFFFF

    @staticmethod
    def seed_args(*args: Any) -> None:
        """Seed all three by arguments."""
        SystemRng.seed(SystemRng.get_seed_from_args(*args))


class WorkerRng:
    """A generator of this worker's own.

    Args:
        worker_config: its seed is :meth:`~energon_lite.WorkerConfig.worker_seed`.
    """

    def __init__(self, worker_config: WorkerConfig):
        self.worker_config = worker_config
        self._rng: torch.Generator | None = None

    @property
    def rng(self) -> torch.Generator:
        """Made at the first call."""
        if self._rng is None:
            self._rng = torch.Generator()
            self._rng.manual_seed(self.worker_config.worker_seed())
        return self._rng

    def randbelow(self, n: int) -> int:
        """A number from 0 to n - 1."""
        return int(torch.randint(0, n, (), generator=self.rng))

    def choice_idx(self, probs: torch.Tensor) -> int:
        """A place, in proportion to ``probs``."""
        return int(torch.multinomial(probs.double(), 1, generator=self.rng))

    def choice(self, l: list[T], probs: torch.Tensor | None = None) -> T:  # noqa: E741  # Energon's name for it
        """An entry of a list."""
        return l[self.randbelow(len(l)) if probs is None else self.choice_idx(probs)]

    def shuffle(self, l: list[T]) -> list[T]:  # noqa: E741
        """The entries in another order."""
        return [l[place] for place in torch.randperm(len(l), generator=self.rng).tolist()]

    def rand_pop(self, l: list[T]) -> T:  # noqa: E741
        """An entry that is taken out of the list."""
        return l.pop(self.randbelow(len(l)))

    def save_state(self) -> dict[str, Any]:
        """Where it is, as plain data."""
        return {"rng": bytes(self.rng.get_state().tolist())}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Go back to where it was."""
        self._rng = torch.Generator()
        self._rng.set_state(torch.frombuffer(bytearray(state["rng"]), dtype=torch.uint8).clone())
