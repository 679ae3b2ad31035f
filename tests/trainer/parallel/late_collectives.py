"""Collectives that are watched as they are launched, and a network on which none has arrived before a wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from energon_lite.trainer.parallel import collectives


class LateWork:
    """A collective on a network so slow that nothing has happened before somebody waits for it."""

    def __init__(self, collective: Callable[..., dist.Work], out: torch.Tensor, given: torch.Tensor, **how: Any):
        self.out, self.given, self.sent, self.come = out, given, given.clone(), torch.empty_like(out)
        self.work = collective(self.come, self.sent.clone(), **how)
        if out.numel() > given.numel():
            out.fill_(torch.nan)
            given.copy_(self.sent)  # which is a part of the other

    def wait(self) -> None:
        assert torch.equal(self.given, self.sent), "what was being sent was overwritten"
        self.work.wait()
        self.out.copy_(self.come)


@contextmanager
def watched_collectives(*, late: bool = False) -> Iterator[list[str]]:
    """The names of the asynchronous collectives, as they are launched; with ``late`` they happen when waited for."""
    launched: list[str] = []

    def watched(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("async_op"):
                return collective(*args, **kwargs)
            launched.append(name)
            return LateWork(collective, *args, **kwargs) if late else collective(*args, **kwargs)

        return call

    with patched(watched, (collectives, ("reduce_scatter", "all_gather"))):
        yield launched


def noted(note: Callable[[str, Any, Any], object], *places: tuple[Any, Sequence[str]]) -> AbstractContextManager[None]:
    """``note(name, arguments, named arguments)`` is called before each call of these functions."""

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **how: (note(name, args, how), function(*args, **how))[1]

    return patched(noting, *places)


@contextmanager
def patched(wrap: Callable[[str, Any], Any], *places: tuple[Any, Sequence[str]]) -> Iterator[None]:
    """``wrap(name, f)`` in the place of each function ``f`` of these owners and names."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, names in places:
            for name in names:
                patch.setattr(owner, name, wrap(name, getattr(owner, name)))
        yield
