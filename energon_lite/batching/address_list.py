"""The addresses of a micro-batch, as columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from energon_lite.batching.digests import set_digest

__all__ = ["AddressList", "SpanList"]

Address = tuple[int, int, int]


class AddressList(Sequence[Address]):
    """List of ``(leaf, index, epoch)`` addresses, stored as columns.

    It equals the plain list of its tuples, and takes less time to make, to send and to use.

    Args:
        leaves, indices, epochs: ``n`` integers each.
        digest: see :func:`~energon_lite.batching.digests.set_digest`; None: computed on first use.

    Example:
        >>> addresses = AddressList([0, 0], [7, 3], [1, 1])
        >>> addresses[1], len(addresses)
        ((0, 3, 1), 2)
    """

    __slots__ = ("_digest", "epochs", "indices", "leaves")

    def __init__(self, leaves: list[int], indices: list[int], epochs: list[int], digest: int | None = None):
        self.leaves = leaves
        self.indices = indices
        self.epochs = epochs
        self._digest = digest

    @property
    def digest(self) -> int:
        """The order-independent digest of the addresses."""
        if self._digest is None:
            self._digest = set_digest(list(self))
        return self._digest

    def __len__(self) -> int:
        return len(self.leaves)

    @overload
    def __getitem__(self, place: int) -> Address: ...

    @overload
    def __getitem__(self, place: slice) -> list[Address]: ...

    def __getitem__(self, place: int | slice) -> Address | list[Address]:
        if isinstance(place, slice):
            return list(self)[place]
        return self.leaves[place], self.indices[place], self.epochs[place]

    def __iter__(self) -> Iterator[Address]:
        return zip(self.leaves, self.indices, self.epochs, strict=True)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (AddressList, list)):
            return list(self) == list(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return AddressList, (self.leaves, self.indices, self.epochs, self._digest)


class SpanList(list[tuple[int, ...]]):
    """The samples, or parts of samples, of a micro-batch that is planned by tokens: a list with a digest.

    Args:
        spans: ``(leaf, index, epoch, first token, tokens, 1 for a part or 0 for a whole sample)`` of each.
        digest: see :func:`~energon_lite.batching.digests.set_digest`.
    """

    __slots__ = ("digest",)

    def __init__(self, spans: Iterable[tuple[int, ...]], digest: int):
        super().__init__(spans)
        self.digest = digest

    def __reduce__(self) -> tuple[Any, ...]:
        return SpanList, (list(self), self.digest)
