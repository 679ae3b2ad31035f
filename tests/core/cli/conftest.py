from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tables_by_hand import png
from tests.testing import write_tar


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Four shards of two samples: a PNG, a JSON and a label."""

    def sample(number: int) -> tuple[str, dict[str, bytes]]:
        about = {"text": f"caption {number}", "long": "x" * 200, "list": list(range(9))}
        return f"{number:03d}", {"png": png(2, 2, "red"), "json": json.dumps(about).encode(), "cls": b"1"}

    for shard in range(4):
        write_tar(tmp_path / f"s{shard}.tar", [sample(2 * shard), sample(2 * shard + 1)])
    return tmp_path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in; its modules, whose names end with ``_here``, are forgotten in the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    for name in [name for name in sys.modules if name.endswith("_here")]:
        del sys.modules[name]
