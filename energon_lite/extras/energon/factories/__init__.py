"""Data sets as objects with Energon's names: factories for dataset.yaml, and metadatasets.

Here are the base classes: a path, a split, the conversion of parts to samples, and ``build``; and those of JSONL files.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic

from typing_extensions import Self, TypeVar

from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.errors import UsageError
from energon_lite.extras.energon.epath import EPath
from energon_lite.extras.energon.factories.kinds import iter_jsonl_contents
from energon_lite.hooks import TaskEncoder
from energon_lite.loading.assembly import assembled
from energon_lite.loading.iterators.dataset import Identity, LeafIdentity, SavableDataset
from energon_lite.loading.leaves import open_leaves, open_source
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.options import Chunks
from energon_lite.order.hashing import HashDomain, hash_ints, hash_text
from energon_lite.order.orders import BlendOrder, ConcatOrder, Order
from energon_lite.order.shuffle import LeafOrder
from energon_lite.samples import CrudeSample, Sample
from energon_lite.storage.prepare import prepare_jsonl
from energon_lite.storage.read.opened_source import AnySource, data_digest
from energon_lite.storage.read.webdataset import RawSample
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.field_map import SampleLoader
from energon_lite.trust import trusts
from energon_lite.worker_config import WorkerConfig

SampleT = TypeVar("SampleT", default=Any)

#: Salt of hashes that keeps different purposes apart; this one is for leaves of a recipe.
_LEAF = HashDomain.LEAF.value


class BaseCoreDatasetFactory(ABC, Generic[SampleT]):
    """Maker of a data set of single samples.

    Attributes:
        __sample_type__: type of its samples.
        paths: places of the data.
        subflavors: labels of all samples.
    """

    __sample_type__: ClassVar[Any] = None
    paths: Sequence[EPath]
    subflavors: dict[str, Any]

    @abstractmethod
    def build(self, worker_rotation_offset: int = 0) -> SavableDataset:
        """Build the data set of single samples; in training, endless and shuffled."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples in an epoch, over all ranks."""

    def as_file_store(self) -> Any:
        """Return a store of the samples' parts as files by name.

        Raises:
            UsageError: this kind of data has no store.
        """
        raise UsageError(f"{type(self).__name__} is not a file store", fix="name it under `aux` in a metadataset")


class OneLeafFactory(BaseCoreDatasetFactory[SampleT], Generic[SampleT]):
    """Base class of the factories for the samples of one leaf, unchanged.

    Attributes:
        training: True for an endless, shuffled data set; False for each sample once, in order.
        worker_config: configuration of this rank.
        shuffle_over_epochs: number of epochs to mix; -1: draw with replacement; None: do not shuffle.
    """

    training: bool
    worker_config: WorkerConfig
    shuffle_over_epochs: int | None

    @property
    @abstractmethod
    def opened(self) -> tuple[Leaf, LeafIdentity]:
        """The leaf, with its files, and its identity."""

    def build(self, worker_rotation_offset: int = 0) -> SavableDataset:
        """Build the data set; see :class:`BaseCoreDatasetFactory`. The offset has no effect."""
        leaf, identity = self.opened
        seed, length = self.worker_config.seed_offset, len(leaf.source)
        order: Order = ConcatOrder([length])
        if self.training:
            stream = LeafOrder(length, hash_ints(seed, leaf.key), self.shuffle_over_epochs)
            order = BlendOrder([stream], [1.0], hash_ints(seed, _LEAF))
        settings: Mapping[str, Any] = {"kind": "factory", "training": self.training, "seed": seed}
        return assembled(
            order,
            Identity(settings, (identity,)),
            Chunks(),
            None,
            batch_size=None,
            refill=self.training,
            leaves=(leaf,),
            weights=None,
            task_encoder=TaskEncoder[Any, Any, Any, Any](),
            worker_config=self.worker_config,
        )


class DatasetFactory(OneLeafFactory[SampleT], Generic[SampleT]):
    """Factory for the samples of one folder, file or URL.

    Args:
        path: path of the prepared folder, or of a JSONL file.
        split_part: the split to read.
        training: True for an endless, shuffled data set; False for each sample once, in order.
        worker_config: configuration of this rank.
        shuffle_over_epochs: number of epochs to mix; -1: draw with replacement; None: do not shuffle.
        parallel_shard_iters: accepted for Energon; without effect.
        max_samples_per_sequence: accepted for Energon; without effect unless there is a window.
        subset: the part of the split to read.
        split_config: name of the file with the splits in ``.nv-meta``.
        part_filter: function from the name of a part to whether it is read.

    Attributes:
        filters: conditions under ``filter`` in a metadataset; only samples that meet all of them are read.
    """

    filters: tuple[str, ...] = ()

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split_part: str = "train",
        training: bool = False,
        worker_config: WorkerConfig | None = None,
        shuffle_over_epochs: int | None = 1,
        parallel_shard_iters: int | None = None,
        max_samples_per_sequence: int | None = None,
        subset: Any = None,
        split_config: str | None = None,
        part_filter: Callable[[str], bool] | None = None,
    ):
        self.path = EPath(path)
        self.paths = [self.path]
        self.name = self.path.display_name
        self.split_part = split_part
        self.training = training
        self.worker_config = WorkerConfig(rank=0, world_size=1) if worker_config is None else worker_config
        self.shuffle_over_epochs = shuffle_over_epochs
        self.subset = subset
        self.split_config = split_config
        self.parallel_shard_iters = parallel_shard_iters
        self.max_samples_per_sequence = max_samples_per_sequence
        self.part_filter = part_filter
        if not hasattr(self, "subflavors"):
            self.subflavors = {}

    @classmethod
    def at_path(cls, path: str, **arguments: Any) -> Self:
        """Make the data set of a path as Energon does: its class gets an EPath."""
        return cls(EPath(path), **arguments)

    @abstractmethod
    def sample_loader_of(self, source: AnySource) -> SampleLoader:
        """Return the loader that makes samples from the parts of a source."""

    @cached_property
    def spec(self) -> LeafSpec:
        """Specification of the leaf."""
        split_config = self.split_config or "split.yaml"
        return LeafSpec(
            os.fspath(self.path), self.split_part, subset=self.subset, split_config=split_config, filters=self.filters
        )

    @cached_property
    def source(self) -> AnySource:
        """Source of the samples, by index."""
        return open_source(self.spec)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def opened(self) -> tuple[Leaf, LeafIdentity]:
        source, data = self.source, data_digest(self.source)
        key = hash_ints(_LEAF, hash_text(data), 0)
        leaf = Leaf(f"{self.name}[{self.split_part}]", source, self.sample_loader_of(source), key)
        return leaf, LeafIdentity(self.spec.path, len(source), data, contents=f"{data} {source.contents}")

    def config(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        return {
            "type": type(self).__qualname__,
            "path": str(self.path),
            "split_part": self.split_part,
            "training": self.training,
            "shuffle_over_epochs": self.shuffle_over_epochs,
            "subflavors": self.subflavors,
        }

    def __str__(self) -> str:
        return f"{type(self).__name__}(path={self.path})"


class LeafFactory(OneLeafFactory[SampleT], Generic[SampleT]):
    """Factory for a leaf of a metadataset.

    Args:
        spec: specification of the leaf, from the documents.
        training: True for an endless, shuffled data set; False for each sample once, in order.
        worker_config: configuration of this rank.
        shuffle_over_epochs: number of epochs to mix.
        trust_code: True if its documents may name code.
    """

    def __init__(
        self,
        spec: LeafSpec,
        *,
        training: bool,
        worker_config: WorkerConfig,
        shuffle_over_epochs: int | None = 1,
        trust_code: bool | None = None,
        **ignored: Any,
    ):
        self.spec = spec
        self.training = training
        self.worker_config = worker_config
        self.shuffle_over_epochs = shuffle_over_epochs
        self._trusts = trusts(trust_code)
        self.subflavors = dict(spec.subflavors)
        self.paths = [EPath(path) for path in spec.folders]

    @cached_property
    def opened(self) -> tuple[Leaf, LeafIdentity]:
        (leaf,), (identity,) = open_leaves([self.spec], TaskEncoder[Any, Any, Any, Any](), self._trusts)
        return leaf, identity

    def __len__(self) -> int:
        return len(self.opened[0].source)


class JoinedWebdatasetFactory(LeafFactory[SampleT], Generic[SampleT]):
    """Raises an error: it would need an index that Energon makes ahead. A ``join`` in a metadataset needs none."""

    def __init__(self, inner_datasets: Any, *, joiner: Any, join_index: Any = None, **kwargs: Any):
        raise UsageError(
            "JoinedWebdatasetFactory takes an index of Energon's",
            fix="write the join in a metadataset (`join:` with `joiner:`), as a file or as a dict, and give that to "
            "get_train_dataset",
        )


@dataclass(frozen=True)
class FactoryLoader(SampleLoader):
    """Loader that passes the parts, as bytes, to a function that makes the sample.

    Args:
        load_sample: ``(parts) -> sample``; the parts include __key__, __shard__, __restore_key__ and __sources__.
    """

    load_sample: Callable[[dict[str, Any]], Any] = dict

    def load(self, raw: RawSample, restore_key: tuple[Any, ...]) -> Sample | CrudeSample:
        own = {"__restore_key__": restore_key, "__sources__": (raw.source,)}
        base = {"__key__": raw.key, "__shard__": raw.source.shard_name, **own}
        sample = self.load_sample(CrudeSample(raw.parts, **base))
        if isinstance(sample, dict):
            labels = {**(sample.get("__subflavors__") or {}), **self.subflavors}
            return CrudeSample({**base, **sample, **own, "__subflavors__": labels})
        sample.__subflavors__ = {**(getattr(sample, "__subflavors__", None) or {}), **self.subflavors}
        for name, value in own.items():
            setattr(sample, name, value)
        return sample


class CrudeJsonlDatasetFactory(DatasetFactory[CrudeSample]):
    """Factory for the lines of a JSONL file, as crude samples with a part ``json``. Arguments as for its base.

    Example:
        >>> CrudeJsonlDatasetFactory("chats.jsonl", training=False, worker_config=config).build()
    """

    __sample_type__: ClassVar[Any] = CrudeSample
    iter_dataset_content = staticmethod(iter_jsonl_contents)

    @classmethod
    def prepare_dataset(cls, path: str | os.PathLike[str]) -> int:
        """Write the index of a file's lines (``.jsonl.idx``), as ``energon-lite prepare`` does.

        Returns:
            The number of samples.

        Raises:
            DatasetError: a line is broken; with its number.
        """
        return len(prepare_jsonl(os.fspath(path)))

    def sample_loader_of(self, source: AnySource) -> SampleLoader:
        return SampleLoader(subflavors=self.subflavors, decoder=SampleDecoder())


class DefaultCrudeJsonlDatasetFactory(CrudeJsonlDatasetFactory):
    """Factory for the lines of a JSONL file, with labels.

    Args:
        subflavors: labels of all samples.
        decoder: accepted for Energon; a line is decoded to an object in any case.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        subflavors: Mapping[str, Any] | None = None,
        decoder: Any = None,
        **kwargs: Any,
    ):
        self.subflavors = dict(subflavors or {})
        super().__init__(path, **kwargs)
