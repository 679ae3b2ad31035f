"""Door for stores of samples after the hooks of single samples, which other ranks, runs and epochs find again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from energon_lite.hooks import HookContext, Hooks, TaskEncoder
from energon_lite.loading.makers.columns import Rows
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.outcomes import Address

__all__ = ["OpenedSampleStore", "ReadSample", "SampleStore", "StoredSample"]


class StoredSample(NamedTuple):
    """A sample that a store had; its restore key has no meaning."""

    value: Any


#: Address of a sample, the rows that contain it, and its index in these; of a stored sample, its index in the leaf.
ReadSample = tuple[Address, Rows | StoredSample, int]


class OpenedSampleStore(Protocol):
    """Store of samples after the hooks of single samples, by address, of one data set.

    Its methods raise nothing if the store cannot be used; the samples are then made.
    """

    def missing(self, addresses: Sequence[Address]) -> Sequence[Address]:
        """Return the addresses whose samples must be made."""

    def read(
        self,
        rows: Callable[[Sequence[Address], Sequence[Address]], Iterable[ReadSample]],
        addresses: Sequence[Address],
        wanted: Sequence[Address],
    ) -> Iterable[ReadSample]:
        """Yield the stored sample, or the rows, for each address.

        Args:
            rows: returns the rows for addresses.
            addresses: addresses of samples.
            wanted: addresses of the samples that take their places.
        """

    def add(self, address: Address, sample: Any, key: tuple[Any, ...], context: HookContext) -> None:
        """Store a sample that was made.

        Args:
            address: its address.
            sample: the sample.
            key: its restore key.
            context: context of its hooks: whether they have drawn random numbers, or asked for numbers.

        Raises:
            FatalSampleError: the store has another sample under this address.
        """


class SampleStore(Protocol):
    """Store of samples, the argument ``sample_store`` of a loader. It never changes a batch.

    Example:
        >>> class Everything:
        ...     def opened(self, leaves, encoder, hooks, seed): return MyStore(leaves)
        >>> loader = get_savable_loader(dataset, sample_store=Everything())
    """

    def opened(self, leaves: Sequence[Leaf], encoder: TaskEncoder, hooks: Hooks, seed: int) -> OpenedSampleStore | None:
        """Return the store of a data set; None: its samples take no work, or cannot be stored.

        Args:
            leaves: the leaves, in the order's numbering.
            encoder: the user's hooks.
            hooks: the hooks that are in use.
            seed: seed of all random numbers of the hooks.
        """
