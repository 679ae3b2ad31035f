"""A bucket in memory."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec
import pytest


@pytest.fixture
def bucket() -> Iterator[str]:
    """URL of a bucket in memory."""
    fs = fsspec.filesystem("memory")
    yield "memory://bucket/samples"
    fs.store.clear()  # `rm` fails where several threads have made the same folder: fsspec lists it twice
    fs.pseudo_dirs[:] = [""]
