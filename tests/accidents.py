"""Accidents: processes that are killed at any step of their work, work that is interrupted, and damaged files."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import strategies as st

#: Functions of ``os`` that change what is on the disk, or promise that it is there.
STEPS = ("replace", "rename", "unlink", "remove", "fsync", "mkdir", "rmdir")


def killed_at_every_step(
    work: Callable[[], object], before: Callable[[], object] = lambda: None, more: Sequence[tuple[Any, str]] = ()
) -> Iterator[bool]:
    """Do ``work`` in children, each killed one step later than the one before, until one does it all.

    Args:
        work: what is done, in one process (its own children would not be killed with it).
        before: called before each.
        more: further functions whose calls are steps, as (module, name).

    Yields:
        Whether the child was killed; False once, at the end.
    """
    step, killed = 0, True
    while killed:
        before()
        killed = killed_at(step, work, more)
        yield killed
        step += 1


def die_at(step: int, more: Sequence[tuple[Any, str]] = ()) -> None:
    """Let this process kill itself when it begins its ``step``-th step from now."""
    left = step

    def count(function: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object, **options: object) -> object:
            nonlocal left
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return function(*arguments, **options)

        return counted

    for owner, name in [*((os, name) for name in STEPS), *more]:
        setattr(owner, name, count(getattr(owner, name)))


def killed_at(step: int, work: Callable[[], object], more: Sequence[tuple[Any, str]] = ()) -> bool:
    """Do ``work`` in a child that is killed when it begins its ``step``-th step (from 0); whether it was."""
    _, status = os.waitpid(forked(lambda: (die_at(step, more), work())), 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


def forked(work: Callable[[], object]) -> int:
    """Process id of a child that does ``work``, and ends: with status 0, or with another one if it raises."""
    if child := os.fork():
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[int]:
    """Process id of a child that does ``work``, and is killed at the end."""
    child = forked(work)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@contextmanager
def interrupted(owner: Any, name: str, at: Callable[..., bool] = lambda *_: False) -> Iterator[list[tuple[Any, ...]]]:
    """Have a function raise KeyboardInterrupt for arguments of which ``at`` holds; yields those of its other calls."""
    function, done = getattr(owner, name), list[tuple[Any, ...]]()

    def call(*arguments: Any) -> Any:
        if at(*arguments):
            raise KeyboardInterrupt
        done.append(arguments)
        return function(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield done


def damaged(data: st.DataObject, whole: bytes) -> bytes:
    """The contents of a file after one accident; they may be what they were.

    Args:
        data: hypothesis' ``st.data()``, which chooses the accident.
        whole: the contents, not empty.
    """
    changed = bytearray(whole)
    kind = data.draw(st.sampled_from(["bit", "bit", "zeros", "cut", "more"]))
    place = data.draw(st.integers(0, len(changed) - 1))
    if kind == "bit":
        changed[place] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "zeros":
        size = data.draw(st.integers(1, len(changed) - place))
        changed[place : place + size] = bytes(size)
    elif kind == "cut":
        del changed[place:]
    else:
        changed += data.draw(st.binary(min_size=1, max_size=600))
    return bytes(changed)
