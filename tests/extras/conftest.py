"""Fixtures of the core's tests that tests of extras share."""

from __future__ import annotations

from tests.core.cli.conftest import data
from tests.core.laws.conftest import known_lengths
from tests.core.recipes.conftest import images
from tests.core.storage.conftest import make_tar, ten

__all__ = ["data", "images", "known_lengths", "make_tar", "ten"]
