"""Ctrl-C at any point of ``next()``: what was not handed out comes next, whoever goes on, and nothing comes twice."""

from __future__ import annotations

import dis
import gc
import itertools
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import TaskEncoder, TextSample
from energon_lite.hooks import LendingScope, global_generators, running_context
from tests.testing import in_time, nightly_but, train_loader

PACKAGE = str(Path(sys.modules["energon_lite"].__file__ or "").parent)
#: Behind these Python looks whether a signal has come.
LOOKS = ("RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")


class Interrupts:
    """Raises KeyboardInterrupt at the ``number``-th point at which Python could have done so in the package."""

    def __init__(self, number: int):
        self.left, self.raised, self._process = number, False, os.getpid()
        self._last: dict[FrameType, str] = {}
        self._returned: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        """As ``sys.settrace`` calls it."""
        if os.getpid() != self._process:  # a worker has been forked
            return sys.settrace(None)
        if event == "call":
            frame.f_trace_opcodes = frame.f_code.co_filename.startswith(PACKAGE)
            frame.f_trace_lines = False
        elif event == "return":
            self.leaves(frame)
        elif event == "opcode":
            self.reaches(frame)
        return self

    def leaves(self, frame: FrameType) -> None:
        """A function returns, or yields."""
        self._returned = frame.f_back
        self._last.pop(frame, None)

    def reaches(self, frame: FrameType) -> None:
        """The next opcode of a function is about to be run."""
        before, here = self._last.get(frame), dis.opname[frame.f_code.co_code[frame.f_lasti]]
        self._last[frame] = here
        # A function written in Python returns without another look.
        called = before is not None and before.startswith("CALL") and self._returned is not frame
        self._returned = None
        if called or before in LOOKS:
            self.left -= 1
            if not self.left:
                self.raised = True
                raise KeyboardInterrupt


@contextmanager
def monitored(interrupts: Interrupts) -> Iterator[None]:
    """What ``sys.settrace`` does, from Python 3.12 on, which traces opcodes from the second call of a function on."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    events, process, tool = monitoring.events, os.getpid(), monitoring.DEBUGGER_ID

    def reaches(code: CodeType, offset: int) -> Any:
        if os.getpid() == process and threading.get_ident() == thread and code.co_filename.startswith(PACKAGE):
            return interrupts.reaches(sys._getframe(1))
        return None if code.co_filename.startswith(PACKAGE) else monitoring.DISABLE

    def leaves(code: CodeType, offset: int, value: Any) -> None:
        if os.getpid() == process and threading.get_ident() == thread:
            interrupts.leaves(sys._getframe(1))

    thread = threading.get_ident()
    monitoring.use_tool_id(tool, "interrupts")
    monitoring.register_callback(tool, events.INSTRUCTION, reaches)
    monitoring.register_callback(tool, events.PY_RETURN, leaves)
    monitoring.register_callback(tool, events.PY_YIELD, leaves)
    monitoring.set_events(tool, events.INSTRUCTION | events.PY_RETURN | events.PY_YIELD)
    try:
        yield
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)


@contextmanager
def interrupted(number: int) -> Iterator[Interrupts]:
    before, interrupts = sys.gettrace(), Interrupts(number)
    gc.disable()  # what is raised in a finalizer is swallowed
    try:
        if sys.version_info >= (3, 12):
            with monitored(interrupts):
                yield interrupts
        else:
            sys.settrace(interrupts)
            yield interrupts
    finally:
        sys.settrace(before)
        gc.enable()


Build = Callable[[], Any]


def _keys(batch: Any) -> list[str]:
    return [*batch.__key__, *batch.text]


def _goes_on(build: Build, expected: list[list[str]], number: int, first: int, how: str, threads: bool) -> bool:
    """Interrupt a loader in the batch ``first``; False: that batch has not so many points."""
    loader = build()
    try:
        batches = iter(loader)
        found = [_keys(next(batches)) for _ in range(first)]
        before = random.getstate(), torch.get_rng_state().tolist()
        try:
            with interrupted(number) as interrupts:
                found.append(_keys(next(batches)))
        except KeyboardInterrupt:
            pass
        assert running_context() is None and global_generators._scope.get() is None, "a hook seems to run still"
        state = loader.save_state_rank()
        assert state["position"] == len(found)
        if not threads:  # which may be lent them at this moment
            assert (random.getstate(), torch.get_rng_state().tolist()) == before, "the caller's generators were changed"
        if how == "restored":
            loader.restore_state_rank(state)
        elif how == "anew":
            loader.close()
            loader = build()
            loader.restore_state_rank(state)
        found += [_keys(batch) for batch in itertools.islice(loader, len(expected) - len(found))]
        assert found == expected, f"interrupt {number} of batch {first}"
        return interrupts.raised
    finally:
        loader.close()


def _every(build: Build, first: int, step: int, threads: bool) -> int:
    """Interrupt each ``step``-th point of a batch; returns how many there were."""
    loader = build()
    expected = [_keys(batch) for batch in itertools.islice(loader, first + 6)]
    loader.close()
    hows = itertools.cycle(["looped", "restored", "anew"])
    return sum(
        itertools.takewhile(
            bool, (_goes_on(build, expected, number, first, next(hows), threads) for number in itertools.count(1, step))
        )
    )


class Draws(TaskEncoder):
    """Has the global generators."""

    def encode_sample(self, sample: Any) -> Any:
        return TextSample.derive_from(sample, text=f"{random.random()}, {np.random.rand()}, {torch.rand(1).item()}")


class Yields(TaskEncoder):
    """Decides how many samples there are."""

    def encode_sample(self, sample: Any) -> Iterator[Any]:
        yield from [sample] * (int(sample.text.split("-")[1]) % 3)


KINDS: dict[str, dict[str, Any]] = {
    "planned": {},
    "runs": {"max_samples_per_sequence": 10, "shuffle_buffer_size": 30},
    "draws": {"task_encoder": Draws()},
    "yields": {"task_encoder": Yields(), "lanes": 2},
}


#: How workers are started, how many there are, and of how many points one is tried.
COARSE: list[tuple[str, int, int]] = [("fork", 0, 23), ("thread", 2, 29), ("fork", 2, 101)]
FINE = [("fork", 0, 1), ("thread", 2, 1), ("fork", 2, 7)]


@pytest.mark.parametrize(
    ("first", "method", "workers", "step", "kind"),
    # Without workers each kind once, and every point of one.
    nightly_but(
        {0, 2, 5, 6, 8, 13, 15, 16, 23, 24},
        (
            (first, *how, kind)
            for first, hows in ((0, COARSE), (2, COARSE), (2, FINE))
            for how in hows
            for kind in KINDS
        ),
    ),
)
def test_points_of_a_batch(leaf_of: Any, kind: str, method: Any, workers: int, step: int, first: int) -> None:
    build = partial(train_loader, leaf_of(50), workers, batch_size=3, start_method=method, **KINDS[kind])
    assert step * _every(build, first, step, method == "thread") >= (step if (method, workers, step) in COARSE else 51)


def test_who_is_interrupted_while_it_takes_the_generators_holds_no_lock() -> None:
    """Or its scope knows that it does, and gives them back at its end: else other threads would wait for ever."""

    def is_free() -> bool:
        lock = global_generators._lock
        return in_time(lambda: lock.acquire(blocking=False) and not lock.release())

    points = 0
    for number in itertools.count(1):
        scope = LendingScope()
        try:
            with interrupted(number) as interrupts:
                scope.seed(5)
        except KeyboardInterrupt:
            points += 1
        assert is_free() == (scope._saved is None), f"interrupt {number}"
        with scope:
            pass
        assert is_free()
        if not interrupts.raised:
            break
    assert points > 3
