"""Wrappers that change the length of a data set: limited, repeated, cut into epochs."""

from __future__ import annotations

from functools import cached_property

from energon_lite.errors import UsageError
from energon_lite.extras.energon.wrappers.streams import ItemStream, LimitStream, RepeatStream
from energon_lite.extras.energon.wrappers.wrapper import Parts, WrapperDataset, is_by_content, looped, parts_of
from energon_lite.loading.iterators.dataset import Loop, SavableDataset
from energon_lite.worker_config import WorkerConfig

__all__ = ["EpochizeDataset", "LimitDataset", "RepeatDataset"]

#: Length limit of an endless stream whose passes start again from its first item, in items.
_FOREVER = 1 << 40


class RepeatDataset(WrapperDataset):
    """A data set that starts again when it ends.

    Args:
        dataset: data set that ends, such as one from ``get_val_dataset``; an endless one stays as it is.
        repeats: number of passes; a fraction ends inside a pass, and needs items that have numbers. None: endless.
        restart: as in Energon: the next ``for`` loop starts again. False is refused: a data set here has no state.
        worker_config: that of the data set.

    Example:
        >>> RepeatDataset(get_val_dataset("coco", worker_config=config, batch_size=4), worker_config=config)
    """

    def __init__(
        self,
        dataset: SavableDataset,
        *,
        repeats: float | None = None,
        restart: bool = True,
        worker_config: WorkerConfig | None = None,
    ):
        super().__init__(dataset, worker_config=worker_config)
        if repeats is not None and repeats <= 0:
            raise UsageError(f"repeats is {repeats}", fix="give more than 0, or None for without end")
        if not restart:
            raise UsageError(
                "RepeatDataset(restart=False): a second loop would yield nothing", fix="go through the loader once"
            )
        self._set("repeats", repeats)

    repeats: float | None

    def parts(self) -> Parts:
        inner = parts_of(self.dataset, "RepeatDataset")
        return Parts(RepeatStream(inner.stream, self.repeats), inner.branches, depends_on_ranks=inner.depends_on_ranks)

    @cached_property
    def resolved(self) -> SavableDataset:
        if not is_by_content(self.dataset):
            return self.planned(self.parts())
        times = int(self.repeats or 0)
        if self.repeats not in (None, times):
            raise UsageError(
                f"RepeatDataset(repeats={self.repeats}) of a data set whose hooks or tokens decide how many batches "
                "there are: a part of them is not known",
                fix="give a whole number, or LimitDataset(RepeatDataset(...), length)",
            )
        return looped(self, Loop("repeat", times))

    def _arguments(self) -> str:
        return "" if self.repeats is None else f", repeats={self.repeats}"


class LimitDataset(WrapperDataset):
    """The first items of a data set. Every ``for`` loop starts with the first one again.

    Args:
        dataset: any data set.
        length: largest number of items for each rank.
        reset_after_epoch: accepted for Energon; each pass starts again in any case.
        worker_config: that of the data set.

    Example:
        >>> LimitDataset(RepeatDataset(dataset, worker_config=config), length=50, worker_config=config)
    """

    def __init__(
        self,
        dataset: SavableDataset,
        length: int,
        *,
        reset_after_epoch: bool = False,
        worker_config: WorkerConfig | None = None,
    ):
        super().__init__(dataset, worker_config=worker_config)
        if length < 1:
            raise UsageError(f"LimitDataset(length={length})", fix="give at least 1 item for each rank")
        self._set("length", length)

    length: int

    def parts(self) -> Parts:
        inner = parts_of(self.dataset, "LimitDataset")
        limit = LimitStream(inner.stream, self.length * self.worker_config.world_size)
        return Parts(limit, inner.branches, depends_on_ranks=True)

    @cached_property
    def resolved(self) -> SavableDataset:
        if is_by_content(self.dataset):
            return looped(self, Loop("limit", self.length))
        inner = parts_of(self.dataset, "LimitDataset")
        parts = Parts(_every_pass(inner.stream), inner.branches, depends_on_ranks=inner.depends_on_ranks)
        return self.planned(parts, limit=self.length)

    def _arguments(self) -> str:
        return f", {self.length}"


def _every_pass(stream: ItemStream) -> ItemStream:
    """Return a stream whose passes are all equal to the first one."""
    return LimitStream(stream, _FOREVER if stream.per_pass is None else stream.per_pass)


class EpochizeDataset(WrapperDataset):
    """A data set in ``for`` loops of ``length`` items; each loop continues where the one before ended.

    Args:
        dataset: any data set; one that ends starts again.
        length: items of each rank in a loop.
        worker_config: that of the data set.
    """

    def __init__(self, dataset: SavableDataset, length: int, worker_config: WorkerConfig | None = None):
        super().__init__(dataset, worker_config=worker_config)
        if length < 1:
            raise UsageError(f"EpochizeDataset(length={length})", fix="give at least 1 item for each rank")
        self._set("length", length)

    length: int

    def parts(self) -> Parts:
        inner = parts_of(self.dataset, "EpochizeDataset")
        length = self.length * self.worker_config.world_size
        return Parts(LimitStream(inner.stream, length, goes_on=True), inner.branches, depends_on_ranks=True)

    @cached_property
    def resolved(self) -> SavableDataset:
        if is_by_content(self.dataset):
            return looped(self, Loop("epoch", self.length))
        inner = parts_of(self.dataset, "EpochizeDataset")
        parts = Parts(RepeatStream(inner.stream), inner.branches, depends_on_ranks=inner.depends_on_ranks)
        return self.planned(parts, loop_length=self.length)

    def _arguments(self) -> str:
        return f", {self.length}"
