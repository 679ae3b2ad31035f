"""Fixtures of the core's tests that tests of extras share, and a writer of tars."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.core.cli.conftest import data
from tests.core.laws.conftest import known_lengths
from tests.core.recipes.conftest import images
from tests.core.storage.conftest import ten
from tests.testing import write_members

__all__ = ["data", "images", "known_lengths", "make_tar", "ten"]


@pytest.fixture
def make_tar(tmp_path: Path) -> Callable[..., Path]:
    """``make_tar(name, [(member, data), ...])`` writes a tar with these members; returns its path."""
    return lambda name, *members_and_format: write_members(tmp_path / name, *members_and_format)
