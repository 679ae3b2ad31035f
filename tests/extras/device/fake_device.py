"""A device on the CPU whose copies happen late, in an order that a test decides."""

from __future__ import annotations

import ctypes
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from energon_lite.extras.device.pinned import Arrival


class FakeMark:
    """A mark; the work before it is done when it is asked to be, or when a test says so."""

    def __init__(self, engine: FakeEngine, after: int):
        self._engine, self._after = engine, after

    def query(self) -> bool:
        return self._engine.done >= self._after

    def synchronize(self) -> None:
        self._engine.work(self._after - self._engine.done)


class FakeEngine:
    """A stream. A copy is made of what is in the memory at the time that it happens, and keeps no reference to it."""

    generator: torch.Generator | None = None

    def __init__(self, memory: FakeMemory):
        self.memory = memory
        self._queue: deque[tuple[int, torch.Tensor]] = deque()
        self._begun = 0

    @property
    def done(self) -> int:
        return self._begun - len(self._queue)

    def work(self, copies: int) -> None:
        for _ in range(min(copies, len(self._queue))):
            address, target = self._queue.popleft()
            self.memory.check(address, target.nbytes)
            ctypes.memmove(target.data_ptr(), address, target.nbytes)

    def stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def register(self, address: int, size: int) -> None:
        self.memory.register(address, size)

    def unregister(self, address: int) -> None:
        self.memory.unregister(address)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        target = torch.full_like(tensor, 77)
        if self.memory.has(tensor.data_ptr(), tensor.nbytes):
            self._begun += 1
            self._queue.append((tensor.data_ptr(), target))
        else:  # torch's own page-locked memory, which torch looks after
            target.copy_(tensor)
        return target

    def record(self) -> Arrival:
        return FakeMark(self, self._begun)

    def hand_over(self, batch: Any, arrival: Arrival) -> Any:
        arrival.synchronize()
        return batch


class FakeMemory:
    """What is page-locked, for any number of streams; notes each registration."""

    def __init__(self, *, refuses: bool = False):
        self.now: dict[int, int] = {}
        self.log: list[tuple[str, int, int]] = []
        self.refuses = refuses
        self.asked = 0

    def register(self, address: int, size: int) -> None:
        self.asked += 1
        if self.refuses:
            raise RuntimeError("operation not supported")
        assert not any(address < other + length and other < address + size for other, length in self.now.items())
        self.now[address] = size
        self.log.append(("register", address, size))

    def unregister(self, address: int) -> None:
        (ctypes.c_char * 1).from_address(address).raw  # noqa: B018  # a crash, if it is unmapped already
        self.log.append(("unregister", address, self.now.pop(address)))

    def has(self, address: int, size: int) -> bool:
        return any(start <= address and address + size <= start + length for start, length in self.now.items())

    def check(self, address: int, size: int) -> None:
        assert self.has(address, size), "a copy from memory that is not page-locked any more"

    def count(self, kind: str) -> int:
        return sum(entry[0] == kind for entry in self.log)
