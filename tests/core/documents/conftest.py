"""Fixtures of the tests of configurations that those of documents share."""

from __future__ import annotations

from tests.core.config.conftest import room, write

__all__ = ["room", "write"]
