"""Data sets made of others: limited, repeated, cut into epochs, concatenated, blended, mixed, mapped, filtered."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.extras.energon.wrappers import (
    Parts,
    WrapperDataset,
    is_by_content,
    looped,
    parts_of,
)
from energon_lite.extras.energon.wrappers.items_dataset import ItemFunction
from energon_lite.extras.energon.wrappers.loops import Loop
from energon_lite.extras.energon.wrappers.streams import (
    BlendStream,
    ConcatStream,
    ItemStream,
    PassStream,
    ShuffleStream,
    limited,
    repeated,
)
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.order.hashing import HashDomain, hash_ints
from energon_lite.worker_config import WorkerConfig

#: Upper bound of an endless stream whose passes start again from its first item, in items.
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
        text = "" if repeats is None else f", repeats={repeats}"
        super().__init__(dataset, worker_config=worker_config, text=text, repeats=repeats)
        if repeats is not None and repeats <= 0:
            raise UsageError(f"repeats is {repeats}", fix="give more than 0, or None for without end")
        if not restart:
            raise UsageError(
                "RepeatDataset(restart=False): a second loop would yield nothing", fix="go through the loader once"
            )

    repeats: float | None

    def parts(self) -> Parts:
        inner = super().parts()
        return replace(inner, stream=repeated(inner.stream, self.repeats))

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
        super().__init__(dataset, worker_config=worker_config, text=f", {length}", length=length)
        if length < 1:
            raise UsageError(f"LimitDataset(length={length})", fix="give at least 1 item for each rank")

    length: int

    def parts(self) -> Parts:
        inner = super().parts()
        limit = limited(inner.stream, self.length * self.worker_config.world_size)
        return replace(inner, stream=limit, depends_on_ranks=True)

    @cached_property
    def resolved(self) -> SavableDataset:
        if is_by_content(self.dataset):
            return looped(self, Loop("limit", self.length))
        inner = super().parts()
        # All passes are equal to the first one.
        return self.planned(replace(inner, stream=limited(inner.stream, _FOREVER)), limit=self.length)


class EpochizeDataset(WrapperDataset):
    """A data set in ``for`` loops of ``length`` items; each loop continues where the one before ended.

    Args:
        dataset: any data set; one that ends starts again.
        length: items of each rank in a loop.
        worker_config: that of the data set.
    """

    def __init__(self, dataset: SavableDataset, length: int, worker_config: WorkerConfig | None = None):
        super().__init__(dataset, worker_config=worker_config, text=f", {length}", length=length)
        if length < 1:
            raise UsageError(f"EpochizeDataset(length={length})", fix="give at least 1 item for each rank")

    length: int

    def parts(self) -> Parts:
        inner = super().parts()
        length = self.length * self.worker_config.world_size
        return replace(inner, stream=PassStream(inner.stream, length, length), depends_on_ranks=True)

    @cached_property
    def resolved(self) -> SavableDataset:
        if is_by_content(self.dataset):
            return looped(self, Loop("epoch", self.length))
        inner = super().parts()
        return self.planned(replace(inner, stream=repeated(inner.stream)), loop_length=self.length)


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
        shares = [weight.item() if hasattr(weight, "item") else weight for _, weight in dataset_weights]
        super().__init__(
            [dataset for dataset, _ in dataset_weights],
            worker_config=worker_config,
            text=f", weights={shares}",
            dataset_weights=dataset_weights,
            shares=tuple(shares),
        )
        for weight in shares:
            if not 0 < weight < float("inf"):
                raise UsageError(f"a weight of a BlendDataset is {weight}", fix="give a number above 0")

    dataset_weights: tuple[tuple[SavableDataset, float], ...]
    shares: tuple[float, ...]

    def parts(self) -> Parts:
        key = hash_ints(self.worker_config.seed_offset, _BLEND)
        return _joined(self, lambda streams: BlendStream(streams, self.shares, key))


def _joined(wrapper: WrapperDataset, join: Callable[[Sequence[ItemStream]], ItemStream]) -> Parts:
    parts = [parts_of(dataset, type(wrapper).__name__) for dataset in wrapper.datasets]
    branches = tuple(branch for part in parts for branch in part.branches)
    return Parts(join([part.stream for part in parts]), branches, any(part.depends_on_ranks for part in parts))


class ShuffleBufferDataset(WrapperDataset):
    """The items of a data set, mixed within windows. There is no buffer, because the order is computed.

    Args:
        dataset: any data set.
        size: items in a window.
        worker_config: that of the data set.
    """

    def __init__(self, dataset: SavableDataset, size: int, *, worker_config: WorkerConfig | None = None):
        super().__init__(dataset, worker_config=worker_config, text=f", {size}", size=size)
        if size < 1:
            raise UsageError(f"ShuffleBufferDataset(size={size})", fix="give at least 1")

    size: int

    def parts(self) -> Parts:
        inner = super().parts()
        key = hash_ints(self.worker_config.seed_offset, _SHUFFLE)
        return replace(inner, stream=ShuffleStream(inner.stream, self.size, key))


logger = logging.getLogger(__name__)


class MapDataset(WrapperDataset):
    """A function applied to each item. It runs in the workers, with random generators seeded for each item.

    Args:
        dataset: any data set whose items have numbers.
        map_fn: ``(item) -> item``. It may raise SkipSample: in training, another item takes the place; in validation,
            the place stays empty (None). It also gets the batches without samples of a rank that has no samples left;
            such a batch stays unchanged if the function fails. Generators are refused: write them as ``encode_sample``.
        stateless_map_fn, map_fn_config: accepted for Energon; every function is assumed to be stateless.
        failure_tolerance: number of lost items in a row that ends the iteration; 0: no limit.
        worker_config: that of the data set.

    Example:
        >>> MapDataset(dataset, lambda batch: batch["image"].float(), worker_config=config)
    """

    def __init__(
        self,
        dataset: SavableDataset,
        map_fn: Callable[[Any], Any],
        *,
        stateless_map_fn: bool = False,
        map_fn_config: Any = None,
        failure_tolerance: int = 100,
        worker_config: WorkerConfig | None = None,
    ):
        function = ItemFunction(map_fn, tolerance=failure_tolerance)
        super().__init__(
            dataset, worker_config=worker_config, text=f", {function.name}", map_fn=map_fn, function=function
        )
        if inspect.isgeneratorfunction(map_fn):
            raise UsageError(
                f"MapDataset with the generator {function.name}: how many items there are would not be known",
                fix="write it as encode_sample, or encode_batch, of the task encoder, which may be generators",
            )

    function: ItemFunction

    def parts(self) -> Parts:
        inner = super().parts()
        branches = tuple(replace(branch, functions=(*branch.functions, self.function)) for branch in inner.branches)
        return replace(inner, branches=branches)


class FilterDataset(MapDataset):
    """The items that a function keeps. In training, another item takes the place of one that is left out; in
    validation, the place stays empty (None). Both are counted. All other items keep their places.

    Args:
        dataset: any data set whose items have numbers.
        filter_fn: ``(item) -> bool``.
        filter_fn_config: accepted for Energon.
        worker_config: that of the data set.
    """

    def __init__(
        self,
        dataset: SavableDataset,
        *,
        filter_fn: Callable[[Any], bool],
        filter_fn_config: Any = None,
        worker_config: WorkerConfig | None = None,
    ):
        super().__init__(dataset, filter_fn, worker_config=worker_config)
        vars(self)["function"] = replace(self.function, keeps=True)


class IterMapDataset(WrapperDataset):
    """Refused: a function of the whole stream must be run from the beginning to get any of its items."""

    def __init__(self, *given: Any, **keywords: Any):
        raise UsageError(
            "IterMapDataset: what a function makes of a whole stream cannot be planned, nor restored anywhere",
            fix="write a generator as encode_sample or encode_batch; to see several samples at a time, use packing "
            "(select_samples_to_pack, pack_selected_samples) or batch",
        )


class LogSampleDataset(WrapperDataset):
    """The same items. The loader writes the samples of each batch to a file: ``get_loader(dataset, trace=...)``."""

    def __init__(
        self,
        dataset: SavableDataset,
        mode: str = "train",
        worker_config: WorkerConfig | None = None,
        get_keys_fn: Callable[[Any], list[str] | None] | None = None,
    ):
        super().__init__(dataset, worker_config=worker_config)
        logger.info("LogSampleDataset has no effect: give the loader trace=, a file, and see `energon-lite trace`")


class GcDataset(WrapperDataset):
    """The same items: workers need no garbage collection."""

    def __init__(
        self,
        dataset: SavableDataset,
        *,
        worker_config: WorkerConfig | None = None,
        every_n_iter: int = 10,
        freeze: bool = True,
    ):
        super().__init__(dataset, worker_config=worker_config)
