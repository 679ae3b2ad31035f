"""Digests of the samples that a run was trained on: one of each step, and one of all steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from energon_lite.batching import chain_digest, digest_text
from energon_lite.trainer.parallel.mesh import ParallelMesh

__all__ = ["RunDigest", "digest_parts", "joined_digest"]

#: Number of parts of a 64-bit digest, and bits of a part. The parts are summed over ranks together with float64 counts;
#: sums of integers of 22 bits over 2**31 ranks are exact.
_PARTS = 3
_BITS = 22
#: Bit masks of a part and of a whole digest.
_MASK = (1 << _BITS) - 1
_MASK64 = (1 << 64) - 1


class RunDigest:
    """Chain of the digests of a run's steps in order: equal chains mean equal steps.

    Attributes:
        first: number of the step before the first one in the chain.
        chain: digest of the steps after it.

    Example:
        >>> digest = RunDigest()
        >>> digest.add(1, "00000000000000ff")
        >>> digest.state()["step"]
        1
    """

    def __init__(self) -> None:
        self.first = self.step = self.chain = 0

    def add(self, step: int, digest: str) -> None:
        """Append a finished step to the chain.

        Args:
            step: number of the step.
            digest: digest of its samples, as in its line of metrics.
        """
        self.step, self.chain = step, chain_digest(self.chain, int(digest, 16))

    def state(self) -> dict[str, Any]:
        """Return the chain for a checkpoint."""
        return {"first": self.first, "step": self.step, "chain": digest_text(self.chain)}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Restore a :meth:`state` after ``step`` steps; from an empty one, the chain begins there."""
        self.first, self.step = state.get("first", step), step
        self.chain = int(state.get("chain", "0"), 16)


def digest_parts(digest: int, mesh: ParallelMesh) -> list[float]:
    """Split a digest into three numbers to sum over all ranks; only one loading rank of a replica counts."""
    counts = mesh.is_first_stage and mesh.rank("cp") == 0
    return [float(digest >> (_BITS * part) & _MASK) if counts else 0.0 for part in range(_PARTS)]


def joined_digest(parts: Sequence[float]) -> int:
    """Join the parts of a digest that were summed over ranks."""
    return sum(int(part) << (_BITS * number) for number, part in enumerate(parts)) & _MASK64
