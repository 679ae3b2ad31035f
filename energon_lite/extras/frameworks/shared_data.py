"""A data set that several processes open independently, to make equal samples by address."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from energon_lite.errors import SampleError, StateMismatchError, UsageError
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.planned_dataset import PlannedDataset
from energon_lite.loading.makers.pipeline import Failure, Job
from energon_lite.loading.savable_loader import SavableDataLoader
from energon_lite.named_object import find_named
from energon_lite.order.hashing import hash_ints

__all__ = ["Address", "DataReference", "OpenedData", "open_data"]

#: Numbers of the leaf, of the sample in it, and of the epoch.
Address = tuple[int, int, int]

#: Samples that a process keeps, because several responses to one prompt are generated in succession.
_KEPT = 16


@dataclass(frozen=True)
class DataReference:
    """Reference to a data set, by which a process opens it.

    Args:
        function: ``module:name`` of a function that returns a data set; it is imported in the process that makes
            samples.
        arguments: its arguments: paths, numbers.
        fingerprint: fingerprint of the driver's data set; a difference is an error.
    """

    function: str
    arguments: tuple[Any, ...]
    fingerprint: str

    def __reduce__(self) -> tuple[Any, ...]:
        return DataReference, (self.function, self.arguments, self.fingerprint)

    def opened(self) -> OpenedData:
        """Open the data set in this process. Forked processes open it anew, so as not to share files or locks."""
        return _opened(self, os.getpid())


class OpenedData:
    """A data set opened in a process that makes samples of it. Hooks run one at a time.

    Raises:
        StateMismatchError: its fingerprint is not that of the reference.
    """

    def __init__(self, data: DataReference):
        dataset = open_data(data.function, data.arguments)
        if dataset.identity.fingerprint != data.fingerprint:
            raise StateMismatchError(
                "the keys are of other data, or of other settings, than what this process has opened",
                where=f"{data.function}{data.arguments}",
                fix="give all processes the same files and the same function",
            )
        runs = dataset.resolved
        assert isinstance(runs, PlannedDataset)
        self._loader = SavableDataLoader(dataset)
        self._lock = threading.Lock()
        self._single = runs.pipeline()
        self._batched = replace(runs, batched=True).pipeline()
        for pipeline in (self._single, self._batched):
            pipeline.samples.worker_config = dataset.worker_config
        self._kept: OrderedDict[Address, Any] = OrderedDict()

    def sample(self, address: Address) -> Any:
        """Make a sample, or its replacement; see :meth:`~energon_lite.extras.frameworks.ray.SampleKey.fetch`."""
        with self._lock:
            if address not in self._kept:
                result = self._single.run(Job(0, 0, [address]))
                if result.batch is None:
                    return self._loader.restore_sample(("sample", *address, 0))  # raises the error of the sample
                self._kept[address] = result.batch
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            return self._kept[address]

    def batch(self, addresses: list[Address]) -> Any:
        """Make a batch; see :func:`~energon_lite.extras.frameworks.ray.fetch_batch`."""
        with self._lock:
            number = hash_ints(*addresses[0]) >> 1  # seed of the randomness of batch hooks
            result = self._batched.run(Job(0, number, addresses))
            failures = [outcome for outcome in result.outcomes if isinstance(outcome, Failure)]
            if failures and not self._batched.refill:
                for address in addresses:
                    self._loader.restore_sample(("sample", *address, 0))  # raises the error of the sample
                lost = failures[0]
                raise SampleError(f"the batch cannot be made: {lost.stage}: {lost.reason}", fix=lost.fix or None)
            return result.batch


def open_data(function: str, arguments: tuple[Any, ...]) -> SavableDataset:
    """Call the function that makes a data set, and check the result.

    Raises:
        UsageError: there is no such function, or its result cannot be addressed sample by sample.
    """
    form = {"form": "MODULE:FUNCTION", "example": "my_data:open_prompts"}
    call: Any = find_named(function, option="the data set of keys", wanted="a function that returns a data set", **form)
    dataset = call(*arguments)
    runs = dataset.resolved if isinstance(dataset, SavableDataset) else None
    if not isinstance(runs, PlannedDataset) or runs.plan.rows != 1 or runs.batched or runs.worker_config.world_size > 1:
        raise UsageError(
            f"keys are of single samples, in one order for all; this is a {type(dataset).__name__} of another kind",
            where=function,
            fix="return get_train_dataset(..., batch_size=None, worker_config=WorkerConfig(rank=0, world_size=1)), "
            "without packing and groups; let the workers batch",
        )
    return dataset


@lru_cache(maxsize=32)
def _opened(data: DataReference, process: int) -> OpenedData:
    return OpenedData(data)
