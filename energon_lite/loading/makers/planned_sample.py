"""Check of a sample against its plan by tokens: it has the measured length, or is cut to the planned piece."""

from __future__ import annotations

from typing import Any

from energon_lite.errors import FatalSampleError, SampleError, SkipSample

__all__ = ["as_planned"]


def as_planned(sample: Any, start: int, length: int, is_cut: int) -> Any:
    """Return the piece of a sample that the plan asks for.

    Raises:
        SampleError: the sample is longer than planned, or cannot be cut.
        SkipSample: this piece begins after the end of a sample that is shorter than planned.
        FatalSampleError: the sample is not of a type that this library can cut.
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
        # A cut sample, too, may be shorter than planned; then its last piece is shorter.
        return cut_sequence(sample, start, min(length, there) if there > 0 else length)
    if len(sample.tokens) > length:
        raise SampleError(
            f"the sample has {len(sample.tokens)} tokens, and its batch was planned for {length}",
            where=sample.__key__,
            fix="measure the lengths again: they are not those of this task encoder",
        )
    return sample
