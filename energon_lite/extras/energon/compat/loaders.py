"""Energon's functions that make data sets and loaders, its names of states, and its random number generators."""

from __future__ import annotations

import functools
import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import GenericAlias
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
import torch.utils.data

from energon_lite.batching.plan import FixedPlan
from energon_lite.errors import UnknownLengthError
from energon_lite.extras.energon.compat.dealt_plan import DealtChunkPlan, DealtPlan, Shares
from energon_lite.extras.energon.compat.hooks import DefaultTaskEncoder
from energon_lite.extras.energon.keywords import KEYWORDS
from energon_lite.extras.energon.wrappers.datasets import GcDataset
from energon_lite.loading import loader, recipes, savable_loader
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.lane_dataset import LaneDataset
from energon_lite.loading.iterators.planned_dataset import PlannedDataset
from energon_lite.loading.makers.outcomes import Result
from energon_lite.order.hashing import hash_ints, hash_text
from energon_lite.worker_config import WorkerConfig

#: Arguments about chunks.
_OF_CHUNKS = {"chunks", "chunk_size", "chunk_remainder", "lanes"}

T = TypeVar("T")


def _as_there(function: Callable[..., Any], *, is_validation: bool = True) -> Callable[..., Any]:
    """Wrap a function so that it uses Energon's default task encoder and order of validation.

    Validation has the batches of Energon's workers, in their order: data is dealt to as many shares as there are
    workers, unless the caller gives arguments about chunks.
    """

    @functools.wraps(function)
    def call(path: Any, **kwargs: Any) -> Any:
        if kwargs.get("task_encoder") is None:
            kwargs["task_encoder"] = DefaultTaskEncoder()
        made = function(path, **kwargs)
        if not is_validation or not _OF_CHUNKS.isdisjoint(kwargs):
            return made
        return [(_dealt(dataset), spec) for dataset, spec in made] if isinstance(made, list) else _dealt(made)

    return call


def _dealt(dataset: Any) -> Any:
    """Return a data set dealt to workers like Energon's; batches by tokens, which Energon lacks, are unchanged."""
    world, workers = dataset.worker_config.world_size, max(dataset.worker_config.num_workers, 1)
    shares = Shares(tuple(leaf.length for leaf in dataset.leaves), world, workers)
    old, more = dataset.plan, dict[str, Any]()
    if isinstance(dataset, PlannedDataset) and isinstance(old, FixedPlan):
        plan: DealtPlan | DealtChunkPlan = DealtPlan(old.order, old.batch_size, old.drop_last, shares=shares)
        if world * workers == 1 or not plan.count(0):
            return dataset
    elif isinstance(dataset, LaneDataset) and dataset.bundler is None:
        kept = {field.name: getattr(old, field.name) for field in fields(old) if field.init}
        # A group with few samples may need all of a share.
        size = max(old.packing_buffer_size or 1, int(shares.sizes.max())) if dataset.hooks.groups else old.chunk
        plan, more = DealtChunkPlan(**{**kept, "chunk": size, "shares": shares}), {"lanes": world * workers}
    else:
        return dataset
    identity = replace(dataset.identity, settings={**dataset.identity.settings, "dealt_to": [world, workers]})
    return replace(dataset, plan=plan, identity=identity, **more)


get_train_dataset = _as_there(recipes.get_train_dataset, is_validation=False)
get_val_dataset = _as_there(recipes.get_val_dataset)
get_val_datasets = _as_there(recipes.get_val_datasets)


#: Types of values that conversion does not change.
_PLAIN = frozenset({bytes, str, int, float, bool, type(None), torch.Tensor})


def _converted(value: Any) -> Any:
    """Convert a batch as torch's loader does; long lists, such as of tokens, without a call for each entry."""
    if type(value) is dict:
        return {key: _converted(entry) for key, entry in value.items()}
    if type(value) is list:
        return value if _PLAIN.issuperset(map(type, value)) else [_converted(entry) for entry in value]
    return torch.utils.data.default_convert(value)


class _LoaderAsThere(loader.DataLoader):
    """Loader with Energon's conversion of batches, and length: for content-decided ones as if hooks kept all samples.

    Torch's loader, which Energon's is, converts arrays in dicts, lists and tuples to tensors, and tuples to lists.
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # allows parameters in annotations

    def _finished(self, result: Result, asked: float) -> Any:
        return _converted(super()._finished(result, asked))

    def __len__(self) -> int:
        try:
            return super().__len__()
        except UnknownLengthError:
            dataset = self.dataset.resolved
            rows = getattr(dataset.plan, "batch_size", None)
            if rows is None or self.dataset is not dataset:
                raise
            samples = sum(leaf.length for leaf in dataset.leaves)
            return -(-samples // (rows * dataset.worker_config.world_size))


class _TorchLoader(torch.utils.data.DataLoader[Any]):
    """Attributes of torch's loader, without effect."""

    batch_size = None
    sampler: Any = None
    batch_sampler = None
    collate_fn: Any = None
    drop_last = False
    pin_memory = False
    persistent_workers = True
    timeout = 0.0
    worker_init_fn = None
    generator = None

    @property
    def num_workers(self) -> int:  # type: ignore[override]
        """Number of worker processes of this rank."""
        return self.worker_config.num_workers  # type: ignore[attr-defined]


class BasicDataLoader(_LoaderAsThere, _TorchLoader):  # type: ignore[misc]
    """The loader :class:`energon_lite.DataLoader` as a torch loader, with Energon's keywords."""

    def __init__(self, dataset: SavableDataset, **kwargs: Any):
        super().__init__(dataset, **KEYWORDS.of_loader(BasicDataLoader, kwargs, dataset))


class SavableDataLoader(_LoaderAsThere, savable_loader.SavableDataLoader, _TorchLoader):  # type: ignore[misc]
    """The loader :class:`energon_lite.SavableDataLoader` as a torch loader, with Energon's keywords."""

    def __init__(self, dataset: SavableDataset, **kwargs: Any):
        super().__init__(dataset, **KEYWORDS.of_loader(SavableDataLoader, kwargs, dataset))


#: Energon's keywords with their defaults: of both functions, and of the second one.
_KEYWORDS = {"prefetch_factor": 2, "cache_pool": None, "watchdog_timeout_seconds": 60, "fail_on_timeout": False}
_KEYWORDS |= {"watchdog_initial_timeout_seconds": None, "worker_config": None}
_OF_SNAPSHOTS = {"checkpoint_every_sec": 60, "checkpoint_every_min_n_samples": None, "n_checkpoints": None}
_OF_SNAPSHOTS |= {"gc_collect_every_n_steps": 10}


def _showing(keywords: dict[str, Any]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Name Energon's keywords in the signature of a function, where code for several versions looks for them."""

    def named(function: Callable[..., T]) -> Callable[..., T]:
        own = inspect.signature(function)
        dataset, more = own.parameters.values()
        given = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=keywords[name]) for name in keywords]
        function.__signature__ = own.replace(parameters=[dataset, *given, more])  # type: ignore[attr-defined]
        return function

    return named


@_showing(_KEYWORDS)
def get_loader(dataset: SavableDataset, **kwargs: Any) -> BasicDataLoader:
    """Make a loader, as :func:`energon_lite.get_loader` does."""
    return BasicDataLoader(dataset, **kwargs)


@_showing(_KEYWORDS | _OF_SNAPSHOTS)
def get_savable_loader(dataset: SavableDataset, **kwargs: Any) -> SavableDataLoader:
    """Make a savable loader, as :func:`energon_lite.get_savable_loader` does."""
    return SavableDataLoader(dataset, **kwargs)


class FlexState(dict[str, Any]):
    """State in the form of a dict."""


#: Type of the result of ``save_state_rank``.
SavableDataLoaderState = dict


class Savable(ABC):
    """Interface of objects with a state."""

    @abstractmethod
    def save_state(self) -> Any:
        """Return the state."""

    @abstractmethod
    def restore_state(self, state: Any) -> None:
        """Restore a state."""


class WatchdogDataset(GcDataset):
    """Data set with the same items: the loader watches workers, by ``watchdog_timeout_seconds``."""

    def __init__(
        self,
        dataset: SavableDataset,
        worker_config: WorkerConfig,
        timeout_seconds: float | None = 60,
        initial_timeout_seconds: float | None = None,
        fail_on_timeout: bool = False,
    ):
        super().__init__(dataset, worker_config=worker_config)

    @staticmethod
    def _watchdog_trigger() -> None:
        """Hook for user code to patch, called when a loader without workers has warned of a hang."""


class SimpleSavableDatasetWrapper(GcDataset):
    """Data set with the same items."""

    def __init__(self, dataset: SavableDataset, worker_config: WorkerConfig, cache_pool: Any = None):
        super().__init__(dataset, worker_config=worker_config)


class GcFreezeError(Exception):
    """Error that is never raised here."""


def gc_init_worker(worker_id: int) -> None:
    """Do nothing."""


@dataclass
class Bucket:
    """Collected samples of a group."""

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # allows parameters in annotations

    batch_size: int
    samples: list[Any]


class SystemRngState(NamedTuple):
    """States of the three generators."""

    torch: Any
    numpy: Any
    random: Any


class SystemRng:
    """Seeding and states of the global generators of Python, numpy and torch, together."""

    @staticmethod
    def seed(seed: int) -> None:
        """Seed the three generators."""
        torch.manual_seed(seed)
        np.random.seed(seed % (1 << 32))
        random.seed(seed)

    @staticmethod
    def save_state() -> SystemRngState:
        """Return the states of all three."""
        return SystemRngState(torch.get_rng_state(), np.random.get_state(), random.getstate())

    @staticmethod
    def restore_state(state: SystemRngState) -> None:
        """Restore the states of all three."""
        torch.set_rng_state(state.torch)
        np.random.set_state(state.numpy)
        random.setstate(state.random)

    @staticmethod
    def get_seed_from_args(*args: Any) -> int:
        """Return a 32-bit seed computed from the text of the arguments."""
        return hash_ints(*(hash_text(str(argument)) for argument in args)) & 0xFFFFFFFF

    @staticmethod
    def seed_args(*args: Any) -> None:
        """Seed all three from arguments."""
        SystemRng.seed(SystemRng.get_seed_from_args(*args))


class WorkerRng:
    """Random generator of this worker.

    Args:
        worker_config: configuration whose :meth:`~energon_lite.WorkerConfig.worker_seed` seeds it.
    """

    def __init__(self, worker_config: WorkerConfig):
        self.worker_config = worker_config
        self._rng: torch.Generator | None = None

    @property
    def rng(self) -> torch.Generator:
        """The generator, made on first access."""
        if self._rng is None:
            self._rng = torch.Generator()
            self._rng.manual_seed(self.worker_config.worker_seed())
        return self._rng

    def randbelow(self, n: int) -> int:
        """Return a random number from 0 to n - 1."""
        return int(torch.randint(0, n, (), generator=self.rng))

    def choice_idx(self, probs: torch.Tensor) -> int:
        """Return a random index with probabilities proportional to ``probs``."""
        return int(torch.multinomial(probs.double(), 1, generator=self.rng))

    def choice(self, l: list[T], probs: torch.Tensor | None = None) -> T:  # noqa: E741  # Energon's name for it
        """Return a random entry of a list."""
        return l[self.randbelow(len(l)) if probs is None else self.choice_idx(probs)]

    def shuffle(self, l: list[T]) -> list[T]:  # noqa: E741
        """Return the entries in random order."""
        return [l[place] for place in torch.randperm(len(l), generator=self.rng).tolist()]

    def rand_pop(self, l: list[T]) -> T:  # noqa: E741
        """Remove a random entry from the list and return it."""
        return l.pop(self.randbelow(len(l)))

    def save_state(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {"rng": bytes(self.rng.get_state().tolist())}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self._rng = torch.Generator()
        self._rng.set_state(torch.frombuffer(bytearray(state["rng"]), dtype=torch.uint8).clone())
