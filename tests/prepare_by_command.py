"""``energon-lite prepare`` on four small shards, and what it has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.testing import command

FIELDS = '{"image": "png", "caption": "json[text]"}'


def run(data: Path, *options: str, answers: str | None = None) -> tuple[int, str]:
    return command("prepare", data, *options, answers=answers)


def written(data: Path) -> set[str]:
    """What is in ``.nv-meta``, apart from what spares the next attempt the scanning."""
    return {path.name for path in (data / ".nv-meta").glob("*")} - {"energon_lite.shards", "energon_lite.unfinished"}


def document(data: Path, name: str = "dataset.yaml") -> Any:
    return yaml.safe_load((data / ".nv-meta" / name).read_text())
