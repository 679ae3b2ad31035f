"""Batches and ranks for tests of the trainer in one process."""

from __future__ import annotations

import pytest

from energon_lite.trainer.parallel.mesh import ParallelMesh

# Test folders are no packages; the helpers beside this file are imported by their plain names.


@pytest.fixture
def alone() -> ParallelMesh:
    """The mesh of one process without a process group."""
    return ParallelMesh()
