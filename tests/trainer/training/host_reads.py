"""Counting how often the host looks at a tensor: on a GPU, each time it waits until all before that is done."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

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
