from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[..., Path]


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A folder with three data sets (empty folders are enough here), a metadataset and some code."""
    for name in ("digits", "prose", "sub/photos"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "good.yaml").write_text("splits: {train: {path: digits}, held_out: {path: prose}}\n")
    (tmp_path / "sample_loader.py").write_text("def sample_loader(raw): return raw\n")
    (tmp_path / "digits" / "shard-000.tar").write_bytes(b"")
    return tmp_path


@pytest.fixture
def write(room: Path) -> Write:
    """Writes a document into the room; returns its path."""

    def write_document(text: str | bytes, name: str = "doc.yaml") -> Path:
        path = room / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_document
