"""Counting on a processor the places where the host would wait for a GPU: torch's device ``meta`` stands for it.

Its tensors have no values, so whatever needs one shows: a read, a copy that blocks, an index made of a mask. (Of all
ways to wait, only ``x[[0, 1]]`` leaves no trace.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from energon_lite.trainer import ParallelMesh, build_mesh
from energon_lite.trainer.optimizer import overlapped_optimizer

DEVICE = torch.device("meta")
#: Operations whose result has a size that only the device knows.
_OF_UNKNOWN_SIZE = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")


def device_mesh() -> ParallelMesh:
    """One rank on the device that stands for a GPU."""
    return dataclasses.replace(build_mesh(), device=DEVICE)


@contextmanager
def device_waits() -> Iterator[list[str]]:
    """A list with a name for each wait within the block."""
    with _Waits() as waits, pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (torch.Tensor, "new_tensor")):
            patch.setattr(owner, name, waits.noted(getattr(owner, name)))
        # Addresses, of which tensors without memory have none.
        patch.setattr(overlapped_optimizer, "check_memory", lambda places: None)
        yield waits.found


class _Waits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def noted(self, make: Any) -> Any:
        """A maker of tensors of the host's numbers: on a device, it copies them from memory that is not pinned."""

        def made(*args: Any, **how: Any) -> Any:
            here = any(isinstance(value, torch.Tensor) and value.device == DEVICE for value in args)
            if ((torch.device(how.get("device") or "cpu") == DEVICE) and not here) or ("new" in make.__name__ and here):
                self.found.append("numbers of the host")
            return make(*args, **how)

        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        how, name = kwargs or {}, func.overloadpacket.__name__
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is None:  # torch's fused SGD lacks the device
            return None if name == "_fused_sgd_" else func(*args, **how)
        here = first.device == DEVICE
        if name == "_local_scalar_dense" and here:
            self.found.append("a number is read")
            return 1
        if (name in _OF_UNKNOWN_SIZE and here) or (name == "repeat_interleave" and how.get("output_size") is None):
            self.found.append(name)
            return torch.zeros(1, max(first.dim(), 1), dtype=torch.int64, device=DEVICE)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and here:
            wrong = [i for i in args[1] if i is not None and (i.dtype == torch.bool or i.device != DEVICE)]
            self.found += ["an index of a mask or of the host"] * len(wrong)
        if name == "_to_copy" and here != (torch.device(how.get("device") or first.device) == DEVICE):
            self.found += [] if how.get("non_blocking") else ["a copy that blocks"]
            if here:  # numbers of buckets, for the optimizer
                made = torch.arange(first.numel()) if first.dtype == torch.int64 else torch.zeros(first.numel())
                return made.view(first.shape).to(how.get("dtype") or first.dtype)
        if name == "copy_" and here != (args[1].device == DEVICE):
            self.found += [] if any(args[2:]) or how.get("non_blocking") else ["a copy that blocks"]
            return first
        return func(*args, **how)
