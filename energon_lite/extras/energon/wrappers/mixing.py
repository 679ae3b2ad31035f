"""Wrappers that join several data sets: one after the other, or by weight."""

from __future__ import annotations

from collections.abc import Sequence

from energon_lite.errors import UsageError
from energon_lite.extras.energon.wrappers.streams import BlendStream, ConcatStream, ItemStream, ShuffleStream
from energon_lite.extras.energon.wrappers.wrapper import Parts, WrapperDataset, parts_of
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.order.hashing import HashDomain, hash_ints
from energon_lite.worker_config import WorkerConfig

__all__ = ["BlendDataset", "ConcatDataset", "ShuffleBufferDataset"]

#: Mixing of a blend.
_BLEND = HashDomain.WRAPPED_BLEND.value
#: Mixing within windows.
_SHUFFLE = HashDomain.WRAPPED_SHUFFLE.value


class ConcatDataset(WrapperDataset):
    """Data sets one after the other. All but the last must end.

    Example:
        >>> ConcatDataset(first, second, worker_config=config)
    """

    def __init__(self, *datasets: SavableDataset, worker_config: WorkerConfig | None = None):
        super().__init__(datasets, worker_config=worker_config)

    def parts(self) -> Parts:
        return _joined(self, ConcatStream)


class BlendDataset(WrapperDataset):
    """Data sets mixed by weight, exact within one item at the end of each block. Data sets that end drop out, and the
    others continue at their shares, until all have ended.

    Args:
        dataset_weights: pairs ``(data set, weight)``.
        worker_config: that of the data sets.

    Example:
        >>> BlendDataset((first, 3), (second, 1), worker_config=config)
    """

    def __init__(self, *dataset_weights: tuple[SavableDataset, float], worker_config: WorkerConfig | None = None):
        super().__init__([dataset for dataset, _ in dataset_weights], worker_config=worker_config)
        weights = tuple(weight for _, weight in dataset_weights)
        for weight in weights:
            if not 0 < weight < float("inf"):
                raise UsageError(f"a weight of a BlendDataset is {weight}", fix="give a number above 0")
        self._set("dataset_weights", tuple(dataset_weights))
        self._set("shares", weights)

    dataset_weights: tuple[tuple[SavableDataset, float], ...]
    shares: tuple[float, ...]

    def parts(self) -> Parts:
        key = hash_ints(self.worker_config.seed_offset, _BLEND)
        return _joined(self, lambda streams: BlendStream(streams, self.shares, key))

    def _arguments(self) -> str:
        return f", weights={list(self.shares)}"


def _joined(wrapper: WrapperDataset, stream: type[ConcatStream] | object) -> Parts:
    inner_parts = [parts_of(dataset, type(wrapper).__name__) for dataset in wrapper.datasets]
    make = stream
    streams: Sequence[ItemStream] = [parts.stream for parts in inner_parts]
    branches = [branch for parts in inner_parts for branch in parts.branches]
    depends = any(parts.depends_on_ranks for parts in inner_parts)
    return Parts(make(streams), branches, depends_on_ranks=depends)  # type: ignore[operator]


class ShuffleBufferDataset(WrapperDataset):
    """The items of a data set, mixed within windows. There is no buffer, because the order is computed.

    Args:
        dataset: any data set.
        size: items in a window.
        worker_config: that of the data set.
    """

    def __init__(self, dataset: SavableDataset, size: int, *, worker_config: WorkerConfig | None = None):
        super().__init__(dataset, worker_config=worker_config)
        if size < 1:
            raise UsageError(f"ShuffleBufferDataset(size={size})", fix="give at least 1")
        self._set("size", size)

    size: int

    def parts(self) -> Parts:
        inner = parts_of(self.dataset, "ShuffleBufferDataset")
        key = hash_ints(self.worker_config.seed_offset, _SHUFFLE)
        stream = ShuffleStream(inner.stream, self.size, key)
        return Parts(stream, inner.branches, depends_on_ranks=inner.depends_on_ranks)

    def _arguments(self) -> str:
        return f", {self.size}"
