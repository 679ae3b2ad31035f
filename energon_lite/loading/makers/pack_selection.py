"""Default selection for packing, for encoders without their own: full packs of a given number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from energon_lite.batching.best_fit_decreasing import full_packs
from energon_lite.batching.capacity import at_least_one
from energon_lite.errors import FatalSampleError, field_of
from energon_lite.hooks import PackedSamplesOutput, TaskEncoder, is_overridden
from energon_lite.loading.makers.outcomes import Address
from energon_lite.loading.makers.sample_length import SampleLength

__all__ = ["DEFAULT_BUFFER", "PackSelection", "pack_selection"]

#: Samples of a buffer by default. From about 64 on, packs hardly become fuller; a resumed run makes the samples of the
#: running buffers again.
DEFAULT_BUFFER = 128


def pack_selection(encoder: TaskEncoder) -> PackSelection | None:
    """Return the default selection for an encoder; None: it has its own selection, or does not pack."""
    capacity = encoder.pack_capacity
    if capacity is None or is_overridden(encoder, "select_samples_to_pack"):
        return None
    at_least_one("give the tokens of a pack, or None", pack_capacity=capacity)
    return PackSelection(SampleLength(encoder), capacity)


@dataclass(frozen=True)
class PackSelection:
    """Replacement for ``select_samples_to_pack``: full packs of the samples of a buffer, in order from its beginning.

    Args:
        length: function that returns the length of a sample in tokens.
        capacity: capacity of a pack in tokens.
    """

    length: SampleLength
    capacity: int

    def __call__(self, samples: list[Any], addresses: Sequence[Address | None]) -> PackedSamplesOutput[Any]:
        """Return the packs, none of which mixes epochs, and push back the last samples of the buffer.

        Args:
            samples: the samples of the buffer.
            addresses: their addresses, as far as they are known.

        Raises:
            FatalSampleError: a sample has no length, or is longer than a pack.
        """
        lengths = list(map(self.length, samples))
        longest = max(lengths)
        if longest > self.capacity:
            raise FatalSampleError(
                f"a sample of {longest} tokens does not fit into a pack of {self.capacity}",
                where=str(field_of(samples[lengths.index(longest)], "__key__") or ""),
                fix="raise pack_capacity of the task encoder, or skip or cut such samples before they are packed",
            )
        owners = [None if address is None else (address[:2], address[2]) for address in addresses]
        packs, taken = full_packs(lengths, self.capacity, owners)
        return PackedSamplesOutput([[samples[place] for place in pack] for pack in packs], samples[taken:])
