"""The example with torch's distributed checkpoint, saved on one number of ranks and resumed on others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from examples.frameworks.with_distributed_checkpoint import train
from tests.trainer.parallel.rank_processes import RunRanks


def test_a_run_goes_on_with_other_ranks(tmp_path: Path, leaf_of: Callable[..., Path], run_ranks: RunRanks) -> None:
    leaf = leaf_of(14, "ranks")

    def up_to(steps: int) -> Callable[[int], list[str]]:
        return lambda rank: train(leaf, tmp_path / "resumed", steps)

    seen = interleaved(run_ranks(4, up_to(5)))
    seen += train(leaf, tmp_path / "resumed", 10)
    seen += interleaved(run_ranks(2, up_to(15)))
    undisturbed = train(leaf, tmp_path / "undisturbed", 4 * 5 + 5 + 2 * 5)
    assert seen == undisturbed


def interleaved(by_rank: list[list[str]], batch: int = 2) -> list[str]:
    """The samples of all ranks in the order of the global sequence of batches."""
    steps = len(by_rank[0]) // batch
    return [key for step in range(steps) for rank in by_rank for key in rank[batch * step : batch * (step + 1)]]
