"""Fixtures of the core's tests that tests of blends share."""

from __future__ import annotations

from tests.core.config.conftest import room, write
from tests.core.laws.conftest import cluster

__all__ = ["cluster", "room", "write"]
