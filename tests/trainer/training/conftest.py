"""Batches and ranks for tests of the trainer in one process."""

from __future__ import annotations

import pytest

from energon_lite.trainer.parallel.mesh import ParallelMesh


@pytest.fixture
def alone() -> ParallelMesh:
    """The mesh of one process without a process group."""
    return ParallelMesh()
