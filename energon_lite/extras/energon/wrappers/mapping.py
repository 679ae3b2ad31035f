"""Wrappers that apply the user's functions to the items of a data set."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.extras.energon.wrappers.items_dataset import ItemFunction
from energon_lite.extras.energon.wrappers.wrapper import Parts, WrapperDataset, function_name, parts_of
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.worker_config import WorkerConfig

__all__ = ["FilterDataset", "GcDataset", "IterMapDataset", "LogSampleDataset", "MapDataset"]

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
        super().__init__(dataset, worker_config=worker_config)
        if inspect.isgeneratorfunction(map_fn):
            raise UsageError(
                f"MapDataset with the generator {function_name(map_fn)}: how many items there are would not be known",
                fix="write it as encode_sample, or encode_batch, of the task encoder, which may be generators",
            )
        self._set("map_fn", map_fn)
        self._set("function", ItemFunction(map_fn, function_name(map_fn), tolerance=failure_tolerance))

    function: ItemFunction

    def parts(self) -> Parts:
        inner = parts_of(self.dataset, type(self).__name__)
        branches = [replace(branch, functions=(*branch.functions, self.function)) for branch in inner.branches]
        return Parts(inner.stream, branches, depends_on_ranks=inner.depends_on_ranks)

    def _arguments(self) -> str:
        return f", {self.function.name}"


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
        self._set("function", replace(self.function, keeps=True))


class IterMapDataset(WrapperDataset):
    """Refused: a function of the whole stream must be run from the beginning to get any of its items."""

    def __init__(
        self,
        dataset: SavableDataset,
        iter_map_fn: Callable[[Any], Any],
        *,
        len_map_fn: Callable[[int], int] | None = None,
        stateless_iter_fn: bool = False,
        iter_map_fn_config: Any = None,
        worker_config: WorkerConfig | None = None,
    ):
        raise UsageError(
            "IterMapDataset: what a function makes of a whole stream cannot be planned, nor restored anywhere",
            fix="write a generator as encode_sample or encode_batch; to see several samples at a time, use packing "
            "(select_samples_to_pack, pack_selected_samples) or batch",
        )

    def parts(self) -> Parts:
        raise NotImplementedError


class _Unchanged(WrapperDataset):
    """Wrapper without any effect on the items."""

    def parts(self) -> Parts:
        return parts_of(self.dataset, type(self).__name__)


class LogSampleDataset(_Unchanged):
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


class GcDataset(_Unchanged):
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
