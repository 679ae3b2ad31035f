"""Fixtures of ranks, shared with the trainer's tests."""

from __future__ import annotations

from tests.trainer.parallel.conftest import run_ranks

__all__ = ["run_ranks"]
