"""Functions of the user's around the items of a data set."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.extras.energon.wrappers.items_pipeline import ItemFunction
from energon_lite.extras.energon.wrappers.wrapper import Parts, WrapperDataset, function_name, parts_of
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.worker_config import WorkerConfig

__all__ = ["FilterDataset", "GcDataset", "IterMapDataset", "LogSampleDataset", "MapDataset"]

logger = logging.getLogger(__name__)


class MapDataset(WrapperDataset):
    """A function of each item. It runs in the workers, and finds the generators seeded for this very item.

    Args:
        dataset: any whose items have numbers.
        map_fn: ``(item) -> item``. May raise SkipSample: in training another item stands in its place then, in
            validation the place stays empty (None). It is given the batch without samples, too, that a rank gets which
            has none left; what it refuses stays as it is. A generator is refused: write it as ``encode_sample``.
        stateless_map_fn, map_fn_config: as in Energon; every function is taken for stateless.
        failure_tolerance: so many items in a row that are lost end the iteration; 0: no limit.
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
    """The items that a function keeps. In training another item stands in the place of one that it leaves out, in
    validation the place stays empty (None). Either is counted. The places of all others stay.

    Args:
        dataset: any whose items have numbers.
        filter_fn: ``(item) -> bool``.
        filter_fn_config: as in Energon.
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
    """Refused: a function of the whole stream would have to be run from the beginning to know any of its items."""

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
    """The same items."""

    def parts(self) -> Parts:
        return parts_of(self.dataset, type(self).__name__)


class LogSampleDataset(_Unchanged):
    """The same items. Which samples are in which batch is written by the loader: ``get_loader(dataset, trace=...)``."""

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
    """The same items: workers have nothing to collect."""

    def __init__(
        self,
        dataset: SavableDataset,
        *,
        worker_config: WorkerConfig | None = None,
        every_n_iter: int = 10,
        freeze: bool = True,
    ):
        super().__init__(dataset, worker_config=worker_config)
