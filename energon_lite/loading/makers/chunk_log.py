"""What happened to the samples of a chunk, in their order, while its batches are made."""

from __future__ import annotations

from collections.abc import Sequence

from energon_lite.loading.makers.outcomes import Address, Failure, Mark, Outcome, of_each

__all__ = ["BEHIND", "ChunkLog", "Origins", "Reading"]

#: Addresses of samples, as far as they are known.
Origins = Sequence[Address | None]
#: What has been read of a chunk: the first four numbers of a :class:`~energon_lite.loading.makers.chunk_job.Place`.
Reading = tuple[int, int, int, int]
#: Behind all that any chunk has.
BEHIND: Reading = (1 << 62, 0, 0, 0)


class ChunkLog:
    """Collects outcomes until the next batch takes them along.

    Where a chunk is gone through a second time to get to its undelivered part, what happened before that part was
    told already.

    Args:
        told: everything before this place of the chunk was told.
        outcomes: of a chunk before, to be told with the first batch of this one.
    """

    def __init__(self, told: Reading, outcomes: Sequence[Outcome] = ()):
        self._told = told
        self._outcomes: list[Outcome] = [*outcomes]
        #: Where the work is.
        self.at: Reading = (0, 0, 0, 0)
        #: Where the running buffer of packing began; None: there are no buffers.
        self.buffer: tuple[int, int] | None = None

    def reads(self, unit: int) -> None:
        """A position of the chunk is read now."""
        if self.buffer is None:
            self.at = (unit, 0, 0, 0)
        else:  # a position whose results began in the buffer before this one belongs to that buffer
            self.at = (self.buffer[0], self.buffer[1] if unit > self.buffer[0] else 0, 0, 0)

    def fail(self, failure: Failure, origins: Origins = (None,)) -> None:
        """These samples were skipped, failed, or were dropped."""
        if self.at >= self._told:
            self._outcomes += of_each(failure, origins)

    def mark(self, mark: Mark, times: int) -> None:
        """Something befell so many samples that are delivered all the same."""
        if self.at >= self._told:
            self._outcomes += [mark] * times

    def fine(self) -> None:
        """A sample went well: failures are not in a row any more."""
        if self._outcomes and isinstance(self._outcomes[-1], Failure):
            self._outcomes.append(Mark.FINE)

    def take(self, origins: Origins = ()) -> list[Outcome]:
        """All outcomes since the last time, and those of the samples that are delivered now."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes + [None if origin is None else origin[0] for origin in origins]

    def __bool__(self) -> bool:
        return bool(self._outcomes)
