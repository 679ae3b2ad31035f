"""What a step launches, by torch's profiler: where no GPU is there to time it, the proof that nothing is done twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@contextmanager
def counted_graphs() -> Iterator[list[int]]:
    """A list with one number: how many graphs the compiler has made within the block, updated when it ends."""
    from torch._dynamo.utils import counters

    found = [counters["stats"]["unique_graphs"]]
    yield found
    found[0] = counters["stats"]["unique_graphs"] - found[0]


def step_counts(step: Callable[[], object], trace: str | None = None) -> dict[str, int]:
    """Count what one call launches.

    Args:
        step: a training step, warmed up, whose numbers it does not wait for.
        trace: where a Chrome trace of it goes; None for none.

    Returns:
        ``operations`` that the host calls; ``kernels`` of the device (without a GPU, operations that are no views);
        ``copies`` from one type or place to another; ``host_reads``: waits for the GPU (without one, reads of single
        numbers, which would wait).
    """
    on_gpu = torch.cuda.is_available()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds) as seen:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    if trace is not None:
        seen.export_chrome_trace(trace)
    events = list(seen.events())
    called = [event for event in events if event.name.startswith("aten::") and not _within(event, "aten::")]
    waits = ("cudaStreamSynchronize", "cudaEventSynchronize") if on_gpu else ("aten::_local_scalar_dense",)
    reads = [event for event in events if event.name in waits]
    on_device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = [event for event in on_device if event.name.startswith("Memcpy")]
    if not on_gpu:
        copies = [event for event in events if event.name == "aten::copy_"]
        on_device = [event for event in called if event.cpu_time_total > 0 and not _is_view(event.name)]
    return {
        "operations": len(called),
        "kernels": len(on_device) - (len(copies) if on_gpu else 0),
        "copies": len(copies),
        # The fused updates of a processor read their own count of steps; those of a GPU do not.
        "host_reads": sum(not _within(event, "aten::_fused_") for event in reads),
    }


def _within(event: Any, prefix: str) -> bool:
    parent = event.cpu_parent
    return parent is not None and (parent.name.startswith(prefix) or _within(parent, prefix))


def _is_view(name: str) -> bool:
    views = "view reshape transpose t split chunk slice select expand unsqueeze squeeze flatten unflatten detach alias"
    return name.removeprefix("aten::") in views.split()
