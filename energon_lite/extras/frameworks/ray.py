"""Samples by address, for trainers with a driver process: Ray's actors, verl.

The driver holds keys of some twenty bytes each, in the order of a data set, and saves its position. A process that
needs a sample makes it from its key: the result is equal in every process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from energon_lite.errors import SampleError, StateMismatchError, UsageError
from energon_lite.imports import find_named
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.planned_dataset import PlannedDataset
from energon_lite.loading.iterators.state import State
from energon_lite.loading.makers.batch_runner import Job
from energon_lite.loading.makers.outcomes import Failure
from energon_lite.loading.savable_loader import SavableDataLoader
from energon_lite.order.hashing import hash_ints

__all__ = ["SampleKey", "SampleKeys", "fetch", "fetch_batch"]

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

    def opened(self) -> OpenedData:
        """Open the data set in this process. Forked processes open it again, and share no files or locks."""
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
        self._refills = runs.refills
        self._single = runs.runner()
        self._batched = replace(runs, batched=True).runner()
        for runner in (self._single, self._batched):
            runner.services.worker_config = dataset.worker_config
        self._kept = lru_cache(_KEPT)(self._made)

    def sample(self, address: Address) -> Any:
        """Make a sample, or its replacement; see :meth:`~energon_lite.extras.frameworks.ray.SampleKey.fetch`."""
        with self._lock:
            return self._kept(address)

    def _made(self, address: Address) -> Any:
        result = self._single.run(Job(0, 0, [address]))
        if result.batch is None:
            return self._loader.restore_sample(("sample", *address, 0))  # raises the error of the sample
        return result.batch

    def batch(self, addresses: list[Address]) -> Any:
        """Make a batch; see :func:`~energon_lite.extras.frameworks.ray.fetch_batch`."""
        with self._lock:
            number = hash_ints(*addresses[0]) >> 1  # seed of the randomness of batch hooks
            result = self._batched.run(Job(0, number, addresses))
            failures = [outcome for outcome in result.outcomes if isinstance(outcome, Failure)]
            if failures and not self._refills:
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


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Key of a sample, from which any process can make it.

    Args:
        data: reference to its data set; one object for all keys, so that a pickled list contains it once.
        address: numbers of the leaf, of the sample in it, and of the epoch.
    """

    data: DataReference
    address: Address

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleKey, (self.data, self.address)

    def fetch(self) -> Any:
        """Make the sample with ``encode_sample``; in training, its replacement if it is skipped or fails.

        This process keeps the last few samples, so do not change them.

        Raises:
            SampleError: in validation, which has no replacements, the sample is skipped or fails.
            StateMismatchError: the data of this process differs from the driver's.
        """
        return self.data.opened().sample(self.address)


class SampleKeys:
    """Keys in the order of a data set, and the position in them, for the driver.

    Args:
        function: ``module:name`` of a function that returns a data set of single samples (``batch_size=None``) for one
            rank, the driver, which distributes the keys to other processes.
        arguments: its arguments, here and in the workers.

    Raises:
        UsageError: there is no such function, or its result cannot be addressed sample by sample.

    Example:
        >>> keys = SampleKeys("my_data:open_prompts", "blend.yaml")
        >>> for batch in keys.batches(256):
        ...     ray.get([worker.step.remote(batch[n::8]) for n, worker in enumerate(workers)])
        ...     torch.save(keys.state_dict(), "keys.pt")
    """

    def __init__(self, function: str, *arguments: Any):
        self.dataset = open_data(function, arguments)
        self.data = DataReference(function, arguments, self.dataset.identity.fingerprint)
        self.is_endless = self.dataset.is_endless
        self._loader = SavableDataLoader(self.dataset)
        self._state = self._loader.state_dict()

    def __len__(self) -> int:
        """Return the number of samples in a pass; for an endless stream, that of its data sets."""
        return len(self.dataset)

    def key(self, number: int) -> SampleKey:
        """Return the key of a sample of the current pass, by its number in it."""
        (planned,) = self._loader.samples_at(number, pass_number=self._state["pass_number"])
        return SampleKey(self.data, planned.restore_key[1:4])

    def take(self, count: int) -> list[SampleKey]:
        """Return the next keys; fewer at the end of a pass, after which the next pass begins.

        Raises:
            UsageError: ``count`` is not positive.
        """
        if count < 1:
            raise UsageError(f"{count} keys were requested", fix="request at least 1")
        state, first = self._state, self._state["position"]
        if self._is_at_end:
            state, first = state | {"pass_number": state["pass_number"] + 1, "position": 0}, 0
        stop = first + count if self.is_endless else min(first + count, len(self))
        self._state = state
        keys = [self.key(number) for number in range(first, stop)]
        self._state = state | {"position": stop}
        return keys

    def batches(self, size: int) -> Iterator[list[SampleKey]]:
        """Yield lists of keys: without end for an endless stream, otherwise to the end of the pass.

        A list counts as delivered when it is yielded.
        """
        while keys := self.take(size):
            yield keys
            if self._is_at_end:
                return

    def state_dict(self) -> State:
        """Return the position as the state of a loader of this data set, which can also resume from it."""
        return dict(self._state)

    def load_state_dict(self, state: State) -> None:
        """Resume from a state of keys, taken in any numbers, or of a loader.

        Raises:
            StateError, StateMismatchError: as for any loader.
        """
        self._loader.load_state_dict(state)
        self._state = self._loader.state_dict()

    @property
    def _is_at_end(self) -> bool:
        return not self.is_endless and self._state["position"] >= len(self)


def fetch(keys: Sequence[SampleKey]) -> list[Any]:
    """Make the samples of keys in this process; each is the result of :meth:`SampleKey.fetch`."""
    return [key.fetch() for key in keys]


def fetch_batch(keys: Sequence[SampleKey]) -> Any:
    """Make the batch of keys: read, encode, and collate by ``batch`` and ``encode_batch`` of the task encoder.

    The batch depends only on the keys.

    Raises:
        SampleError: in validation, a sample or the batch is skipped or fails: none is left out silently.
        UsageError: there are no keys, or they are of several data sets.
    """
    if len(sources := {key.data for key in keys}) != 1:
        raise UsageError(f"a batch of {len(keys)} keys of {len(sources)} data sets", fix="give keys of one")
    return keys[0].data.opened().batch([key.address for key in keys])
