"""Making a micro-batch that was planned by its tokens: samples have the lengths that the plan counted on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from energon_lite.errors import FatalSampleError, SampleError, SkipSample
from energon_lite.loading.makers.pipeline import Address, Job, Pipeline, Result, set_restore_key

__all__ = ["TokenJob", "TokenPipeline", "as_planned", "job_number"]


def job_number(chunk: int, batch: int) -> int:
    """One number for a place in a pass. They grow along the pass, with gaps between chunks."""
    return (chunk << 40) + batch


@dataclass(frozen=True)
class TokenJob(Job):
    """One micro-batch to be made. Its ``addresses`` are pieces of samples.

    Args:
        place: its plan chunk, and its number in it.
    """

    place: tuple[int, int] = (0, 0)


class TokenPipeline(Pipeline):
    """Runs jobs of pieces.

    A sample that fails leaves its place empty, also in training: the tokens of a replacement were not counted.
    """

    #: Pieces are compared with the plan one by one.
    _columns = None

    def run(self, job: Job) -> Result:
        result = super().run(job)
        if isinstance(job, TokenJob):
            set_restore_key(result.batch, ("batch", job.pass_number, *job.place))
            # A place that fails stays empty, so there is one outcome for each piece.
            pieces = zip(job.addresses, result.outcomes, strict=True)
            result.tokens = sum(piece[4] for piece, outcome in pieces if isinstance(outcome, int))
        return result

    def sample(self, address: Address, attempt: int = 0) -> Any:
        """The encoded sample at an address, or a piece of it: ``(leaf, index, epoch, start, length, is cut)``."""
        made = super().sample(address[:3], attempt)
        if len(address) == 3:
            return made
        leaf = self.leaves[address[0]].name
        return self._guarded("plan", leaf, f"sample {address[1]}", made, as_planned, made, *address[3:])


def as_planned(sample: Any, start: int, length: int, is_cut: int) -> Any:
    """The piece of a sample that the plan wants.

    Raises:
        SampleError: the sample is longer than planned, or cannot be cut.
        SkipSample: this piece is behind the end of a sample that is shorter than planned.
        FatalSampleError: it is not a sample that this library can cut.
    """
    from energon_lite.batching.sequences import TokenSequence, cut_sequence

    if not isinstance(sample, TokenSequence):
        if is_cut:
            raise FatalSampleError(
                f"the plan cuts samples, and encode_sample returned a {type(sample).__name__}",
                fix="return a TokenSequence, or choose another `oversize` than truncate and split",
            )
        return sample
    if is_cut:
        there = len(sample.tokens) - start
        if not there:
            raise SkipSample(f"nothing is left of it from token {start} on: it is shorter than planned")
        # A sample may be shorter than planned, also where it is cut: its last piece then is.
        return cut_sequence(sample, start, min(length, there) if there > 0 else length)
    if len(sample.tokens) > length:
        raise SampleError(
            f"the sample has {len(sample.tokens)} tokens, and its batch was planned for {length}",
            where=sample.__key__,
            fix="measure the lengths again: they are not those of this task encoder",
        )
    return sample
