from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A folder with others in it."""
    for name in ("digits", "prose", "sub/photos"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a document; returns its path."""

    def write_document(text: str | bytes, name: str = "doc.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_document
