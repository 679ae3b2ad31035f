"""Which samples a run was trained on, in which step: a digest of each step, and one of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from energon_lite.batching import chain_digest, digest_text
from energon_lite.trainer.parallel.mesh import ParallelMesh

__all__ = ["RunDigest", "digest_parts", "joined_digest"]

#: A digest goes along with float64 counts, whose sums over 2**31 ranks are exact for integers of so many bits.
_PARTS, _BITS = 3, 22
_MASK, _MASK64 = (1 << _BITS) - 1, (1 << 64) - 1


class RunDigest:
    """The chain of the digests of a run's steps, in their order: as long as it is the same, so were all of them.

    Attributes:
        first: the step before the first one that is in the chain.
        chain: of the steps behind it.

    Example:
        >>> digest = RunDigest()
        >>> digest.add(1, "00000000000000ff")
        >>> digest.state()["step"]
        1
    """

    def __init__(self) -> None:
        self.first = self.step = self.chain = 0

    def add(self, step: int, digest: str) -> None:
        """A step is done.

        Args:
            step: its number.
            digest: of its samples, as in its line of metrics.
        """
        self.step, self.chain = step, chain_digest(self.chain, int(digest, 16))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"first": self.first, "step": self.step, "chain": digest_text(self.chain)}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Go on from a :meth:`state` after so many steps; where there is none, the chain begins there."""
        self.first, self.step = state.get("first", step), step
        self.chain = int(state.get("chain", "0"), 16)


def digest_parts(digest: int, mesh: ParallelMesh) -> list[float]:
    """A digest as three numbers, to be summed over all ranks; of a replica, one that loads in any case counts."""
    counts = mesh.is_first_stage and mesh.rank("cp") == 0
    return [float(digest >> (_BITS * part) & _MASK) if counts else 0.0 for part in range(_PARTS)]


def joined_digest(parts: Sequence[float]) -> int:
    """The digest, of sums of the parts of those of the ranks."""
    return sum(int(part) << (_BITS * number) for number, part in enumerate(parts)) & _MASK64
