"""Profiling of a window of steps: times of each kernel and of each pass through the pipeline."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from energon_lite.errors import UsageError

if TYPE_CHECKING:
    from energon_lite.trainer.parallel.mesh import ParallelMesh
    from energon_lite.trainer.training.pipeline import Action, Record


class ProfileWindow:
    """Profiles the steps ``first`` to ``last``, and writes two Chrome traces for each rank.

    ``kernels-rank000.json`` is the trace of torch's profiler. ``passes-rank000.json`` has the forward and backward
    passes of micro-batches, without the waiting between them; ``tools/draw_schedule.py`` merges those of all stages
    into one trace and one picture. Both open in ``chrome://tracing`` or ui.perfetto.dev. On a GPU, the window waits for
    each pass in order to time it, so its steps are slower than others.

    Args:
        window: first and last step, counted from 1.
        folder: folder of the traces.
        mesh: the ranks.
        memory: also write ``memory-rank000.pickle``: the allocations and frees in the window, with call stacks.

    Raises:
        UsageError: ``memory`` is set, and there is no GPU.

    Example:
        >>> window = ProfileWindow((5, 6), "output/profile", mesh)
        >>> with window.step(5) as record:
        ...     train_step(..., record=record)
    """

    def __init__(self, window: tuple[int, int], folder: str | Path, mesh: ParallelMesh, memory: bool = False):
        self.window = window
        self.folder = Path(folder)
        self.mesh = mesh
        self.memory = memory
        if memory and mesh.device.type != "cuda":
            raise UsageError("only the memory of a GPU can be recorded", fix="set train.memory_snapshot: false")
        self._events: list[dict[str, Any]] = []
        self._profiler: torch.profiler.profile | None = None

    @contextmanager
    def step(self, number: int, *_: object) -> Iterator[Record | None]:
        """Surround a step; yields the ``record`` argument of :func:`run_pipeline`, or None outside the window."""
        if not self.window[0] <= number <= self.window[1]:
            yield None
            return
        if self._profiler is None:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if self.mesh.device.type == "cuda":
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=kinds)
            self._profiler.start()
            if self.memory:
                torch.cuda.memory._record_memory_history()
        # The clock of the passes is local to this machine; traces of several machines need wall-clock time. A process
        # that loses its core between the two readings has too small a difference.
        offset = max(time.time() - time.perf_counter() for _ in range(5))
        with torch.profiler.record_function(f"step {number}"):
            yield lambda action, began, ended: self._note(number, action, began + offset, ended + offset)
        if number == self.window[1]:
            self.close()

    def close(self) -> None:
        """Write the traces of the window, if not yet done."""
        if self._profiler is None:
            return
        self._profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        rank = f"rank{self.mesh.global_rank:03d}"
        self._profiler.export_chrome_trace(str(self.folder / f"kernels-{rank}.json"))
        self._profiler = None
        if self.memory:
            torch.cuda.memory._dump_snapshot(str(self.folder / f"memory-{rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        place = {axis: self.mesh.rank(axis) for axis in ("dp", "cp", "tp", "pp")}
        name = {"name": "process_name", "ph": "M", "pid": self.mesh.global_rank, "args": {"name": f"{rank} {place}"}}
        document = {"traceEvents": [name, *self._events], "place": place}
        (self.folder / f"passes-{rank}.json").write_text(json.dumps(document), encoding="utf-8")
        self._events = []

    def _note(self, step: int, action: Action, began: float, ended: float) -> None:
        stage = self.mesh.rank("pp")
        event: dict[str, Any] = {"name": str(action), "cat": "backward" if action.backward else "forward", "ph": "X"}
        event |= {"ts": began * 1e6, "dur": (ended - began) * 1e6, "pid": self.mesh.global_rank, "tid": stage}
        more = {"step": step, "stage": stage, "micro_batch": action.micro_batch, "chunk": action.chunk}
        self._events.append({**event, "args": more})
