"""Counting how often the host looks at a tensor, for which a GPU finishes all before that; and what is launched."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

#: What the profiler calls reading one number; reading several leaves no trace there.
_ONE = "aten::_local_scalar_dense"


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """A list that has, after the block, a name for each read within it."""
    found: list[str] = []
    tolist, here = torch.Tensor.tolist, threading.get_ident()

    def counted(tensor: torch.Tensor) -> Any:
        if threading.get_ident() != here:  # a thread of another test
            return tolist(tensor)
        found.append("tolist")
        with mock.patch.object(torch.Tensor, "tolist", tolist):
            return tolist(tensor)

    with mock.patch.object(torch.Tensor, "tolist", counted), profile(activities=[ProfilerActivity.CPU]) as seen:
        yield found
    found += [event.name for event in seen.events() if event.name == _ONE and not _in_an_update(event.cpu_parent)]


def _in_an_update(event: Any) -> bool:
    """The fused kernels of the CPU read their count of steps, those of a GPU do not."""
    return event is not None and (event.name.startswith("aten::_fused_") or _in_an_update(event.cpu_parent))


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
