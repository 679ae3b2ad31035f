"""A process that is forked while another thread holds a stream's lock."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

from energon_lite.loading.executors.worker_process import renew_streams
from tests.testing import until


@contextmanager
def held(stream: IO[str]) -> Iterator[None]:
    """Another thread is in the middle of a write, for it writes to a pipe that nobody reads."""

    def write() -> None:
        with suppress(BrokenPipeError):
            stream.buffer.write(b"x" * (1 << 20))  # type: ignore[attr-defined]

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    assert until(lambda: not select.select([], [stream], [], 0)[1])
    yield


@pytest.mark.parametrize("renewed", [True, False])
def test_a_child_can_write_where_a_thread_of_its_parent_was_writing(renewed: bool, tmp_path: Path) -> None:
    """Without new streams the child hangs: the test shows both."""
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w", encoding="utf-8")
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("test.forked")
    logger.addHandler(handler)
    try:
        with held(stream):
            child = os.fork()
            if not child:
                if renewed:
                    renew_streams()
                    os.dup2(os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY), writing)
                logger.warning("here")
                os._exit(0)
            done = threading.Event()
            waiting = threading.Thread(target=lambda: (os.waitpid(child, 0), done.set()), daemon=True)
            waiting.start()
            assert done.wait(120 if renewed else 1) == renewed
            if renewed:
                assert (tmp_path / "log").read_text().startswith("here\n")
            else:
                os.kill(child, 9)
            waiting.join()
    finally:
        logger.removeHandler(handler)
        os.close(reading)  # the thread gets EPIPE and ends


def test_a_child_logs_into_the_file_that_its_parent_logs_into(tmp_path: Path) -> None:
    handler, logger = logging.FileHandler(tmp_path / "log"), logging.getLogger("test.forked")
    logger.addHandler(handler)
    try:
        logger.warning("parent")
        child = os.fork()
        if not child:
            renew_streams()
            logger.warning("child")
            os._exit(0)
        os.waitpid(child, 0)
        assert (tmp_path / "log").read_text() == "parent\nchild\n"
    finally:
        logger.removeHandler(handler)
        handler.close()
