"""Names of the samples of a batch, a pack or a buffer in messages."""

from __future__ import annotations

from collections.abc import Sequence

from energon_lite.errors import listed
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.outcomes import Address

__all__ = ["SampleNames"]

#: Largest number of samples that a message names.
_SHOWN = 4


class SampleNames:
    """Text with the number of samples, and, if an error needs them, their names, which are looked up on request.

    Args:
        text: text such as "4 samples"; the format "short" is this text alone.
        addresses: addresses of the samples, as far as they are known.
        leaves: the leaves, in the order's numbering.

    Example:
        >>> str(SampleNames("2 samples", [(0, 3, 0), (0, 5, 0)], leaves))
        '2 samples (00003, 00005 of prose[train])'
    """

    def __init__(self, text: str, addresses: Sequence[Address | None], leaves: Sequence[Leaf]):
        self._text = text
        self._addresses = addresses
        self._leaves = leaves

    def __format__(self, how: str) -> str:
        return self._text if how == "short" else str(self)

    def __str__(self) -> str:
        known = [address for address in self._addresses if address is not None and address[0] >= 0]
        if not known:
            return self._text
        numbers = dict.fromkeys(address[0] for address in known)
        more = len(known) - _SHOWN
        if len(numbers) == 1:
            (number,) = numbers
            keys = [self.key(address) for address in known[:_SHOWN]]
            return f"{self._text} ({listed(keys, _SHOWN, len(known))} of {self._leaves[number].name})"
        keys = [f"{self.key(address)} of {self._leaves[address[0]].name}" for address in known[:_SHOWN]]
        return f"{self._text} ({', '.join(keys)}" + (f" and {more:,} more)" if more > 0 else ")")

    def key(self, address: Address) -> str:
        """Return the key of a sample, or its index if its data set cannot be read."""
        try:
            return self._leaves[address[0]].source.key(address[1])
        except Exception:
            return f"sample {address[1]}"

    @property
    def keys(self) -> list[str] | None:
        """Keys of all samples; None: some addresses are not known."""
        known = [address for address in self._addresses if address is not None and address[0] >= 0]
        return [self.key(address) for address in known] if len(known) == len(self._addresses) else None
