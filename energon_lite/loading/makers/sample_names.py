"""What the samples of a batch, a pack or a buffer are called in messages."""

from __future__ import annotations

from collections.abc import Sequence

from energon_lite.errors import listed
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.outcomes import Address

__all__ = ["SampleNames"]

#: Samples that a message names, at most.
_SHOWN = 4


class SampleNames:
    """How many samples there are; and, where something is wrong with them, which. Looked up when it is asked for.

    Args:
        text: such as "4 samples"; the format "short" is only that.
        addresses: theirs, as far as they are known.
        leaves: the data sets, in the order's numbering.

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
        known = [one for one in self._addresses if one is not None and one[0] >= 0]
        if not known:
            return self._text
        numbers = dict.fromkeys(one[0] for one in known)
        more = len(known) - _SHOWN
        if len(numbers) == 1:
            (number,) = numbers
            keys = [self.key(one) for one in known[:_SHOWN]]
            return f"{self._text} ({listed(keys, _SHOWN, len(known))} of {self._leaves[number].name})"
        keys = [f"{self.key(one)} of {self._leaves[one[0]].name}" for one in known[:_SHOWN]]
        return f"{self._text} ({', '.join(keys)}" + (f" and {more:,} more)" if more > 0 else ")")

    def key(self, address: Address) -> str:
        """The key of a sample, or its place if its data set cannot say."""
        try:
            return self._leaves[address[0]].source.key(address[1])
        except Exception:
            return f"sample {address[1]}"

    @property
    def keys(self) -> list[str] | None:
        """All of them; None: they are not all known."""
        known = [one for one in self._addresses if one is not None and one[0] >= 0]
        return [self.key(one) for one in known] if len(known) == len(self._addresses) else None
