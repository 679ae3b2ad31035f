"""Factories from paths: of single data sets, and of metadatasets with weights."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fractions import Fraction
from typing import Any

from energon_lite.config.dataset import DatasetConfig
from energon_lite.config.leaf_spec import LeafSpec, Subset
from energon_lite.config.metadataset import is_metadataset
from energon_lite.documents import load_yaml
from energon_lite.errors import ConfigError, UsageError
from energon_lite.extras.energon.epath import EPath
from energon_lite.extras.energon.factories import (
    BaseCoreDatasetFactory,
    DatasetFactory,
    DefaultCrudeJsonlDatasetFactory,
    LeafFactory,
)
from energon_lite.extras.energon.factories.webdataset import CrudeWebdataset, StandardWebdatasetFactory
from energon_lite.loading.leaves import dataset_config_of, find_leaves
from energon_lite.samples import SAMPLE_TYPES
from energon_lite.storage.index.nv_meta import is_jsonl
from energon_lite.storage.read.source import source_opener
from energon_lite.trust import trusts
from energon_lite.worker_config import WorkerConfig


def DatasetSubset(  # Energon's name for it
    *, range: tuple[float, float] | None = None, absolute_range: tuple[int, int | None] | None = None
) -> Subset:
    """Return a part of a split.

    Args:
        range: start and stop as shares from 0 to 1, of the samples that ``absolute_range`` leaves.
        absolute_range: first and last index of samples; None: to the end.

    Example:
        >>> DatasetSubset(range=(0, 0.5))
    """
    start, stop = range or (0, 1)
    first, last = absolute_range or (None, None)
    return Subset(Fraction(str(start)), Fraction(str(stop)), first, last)


class DatasetBlendMode(Enum):
    """Meaning of the numbers of a blend's data sets."""

    NONE = "none"
    DATASET_WEIGHT = "dataset_weight"
    SAMPLE_REPETITIONS = "sample_repetitions"


@dataclass(kw_only=True)
class LoadedDataset:
    """A data set of a blend, with its weight or repetitions.

    Args:
        dataset: its factory.
        weight: its share of the blend, or None.
        repetitions: number of times that an epoch shows each of its samples, or None.
        aux: auxiliary stores of files, or None.
    """

    dataset: BaseCoreDatasetFactory
    weight: float | None = None
    repetitions: float | None = None
    aux: Mapping[str, Any] | None = None


@dataclass(kw_only=True)
class LoadedDatasetList:
    """Data sets of a blend, and the meaning of their numbers."""

    datasets: list[LoadedDataset]
    blend_mode: DatasetBlendMode = DatasetBlendMode.NONE


@dataclass
class TraversedDatasetReference:
    """A data set that a metadataset refers to, not opened.

    Args:
        path: path of the data set.
        split_part: the split to read.
        aux: auxiliary stores of files, by name.
        subflavors: its labels; those of outer documents take precedence.
        shuffle_over_epochs_multiplier: number of epochs to mix.
    """

    path: EPath
    split_part: str
    aux: dict[str, EPath] = field(default_factory=dict)
    subflavors: dict[str, Any] = field(default_factory=dict)
    shuffle_over_epochs_multiplier: int | None = 1


class DatasetLoaderInterface(ABC):
    """Interface of data sets, known by path, from which factories are made."""

    def post_initialize(self, mds_path: EPath | None = None) -> None:  # noqa: B027
        """Do nothing; part of Energon's interface."""

    @abstractmethod
    def specs(
        self, split_part: str, subflavors: Mapping[str, Any] | None = None, missing_ok: bool = False
    ) -> list[LeafSpec]:
        """Return the leaves of a split."""

    def traverse(self, mds_path: EPath | None = None, *, split_part: str) -> list[TraversedDatasetReference]:
        """Return the data sets of a split, in order; for a join, all joined ones, which Energon does not support."""
        return [reference for spec in self.specs(split_part, missing_ok=True) for reference in _references(spec)]

    def get_datasets(
        self,
        *,
        training: bool,
        split_part: str,
        worker_config: WorkerConfig,
        subflavors: Mapping[str, Any] | None = None,
        shuffle_over_epochs_multiplier: int | None = 1,
        subset: Any = None,
        **kwargs: Any,
    ) -> LoadedDatasetList:
        """Return the factories of a split, with their weights.

        Args:
            training: True for shuffled, endless data sets.
            split_part: the split, unless the document names another.
            subflavors: further labels, which take precedence.
            shuffle_over_epochs_multiplier: number of epochs to mix.
            subset: a part of each data set.
            kwargs: further arguments of the factories, such as ``decoder``.
        """
        leaves = self.specs(split_part, subflavors)
        datasets = []
        for spec in leaves:
            if subset is not None:
                spec = replace(spec, subset=subset.of(spec.subset))
            factory = _factory_of(
                spec, training=training, worker_config=worker_config, epochs=shuffle_over_epochs_multiplier, **kwargs
            )
            weight = None if spec.repetitions is not None or len(leaves) == 1 else spec.weight
            datasets.append(LoadedDataset(dataset=factory, weight=weight, repetitions=spec.repetitions))
        mode = DatasetBlendMode.DATASET_WEIGHT if len(datasets) > 1 else DatasetBlendMode.NONE
        if any(loaded.repetitions is not None for loaded in datasets):
            mode = DatasetBlendMode.SAMPLE_REPETITIONS
        return LoadedDatasetList(datasets=datasets, blend_mode=mode)

    def prepare(self, split_part: str | None = None) -> Sequence[EPath]:
        """Do nothing and return no paths: data that a join needs is made once, when the join is opened."""
        return ()


@dataclass(kw_only=True)
class DatasetLoader(DatasetLoaderInterface):
    """Loader of a single data set.

    Args:
        path: path of the prepared folder, or of a JSONL file.
        split_part: the split, which takes precedence over that of the methods.
        subflavors, shuffle_over_epochs_multiplier, dataset_config, split_config: as in a metadataset.
    """

    path: str | os.PathLike[str]
    split_part: str | None = None
    subflavors: Mapping[str, Any] | None = None
    shuffle_over_epochs_multiplier: int | None = 1
    dataset_config: str | None = None
    split_config: str | None = None

    def specs(
        self, split_part: str, subflavors: Mapping[str, Any] | None = None, missing_ok: bool = False
    ) -> list[LeafSpec]:
        labels = {**(self.subflavors or {}), **(subflavors or {})}
        configs = (self.dataset_config or "dataset.yaml", self.split_config or "split.yaml")
        return find_leaves(os.fspath(self.path), self.split_part or split_part, *configs, labels)

    def get_dataset(
        self,
        *,
        split_part: str | None = None,
        shuffle_over_epochs: int | None = 1,
        split_config: str | None = None,
        dataset_config: str | None = None,
        **kwargs: Any,
    ) -> BaseCoreDatasetFactory:
        """Return the factory; arguments as for :meth:`get_datasets`.

        Raises:
            UsageError: no split is given.
        """
        split = self.split_part or split_part
        if split is None:
            raise UsageError("which split?", where=os.fspath(self.path), fix='give split_part="train"')
        loader = replace(
            self, dataset_config=dataset_config or self.dataset_config, split_config=split_config or self.split_config
        )
        made = loader.get_datasets(split_part=split, shuffle_over_epochs_multiplier=shuffle_over_epochs, **kwargs)
        return made.datasets[0].dataset


class MetadatasetV2(DatasetLoaderInterface):
    """Loader of a metadataset: a YAML file, or its splits.

    Args:
        path: path of the file. With ``splits``, relative paths start from its folder.
        splits: contents of ``splits``; None: those of the file.
    """

    def __init__(self, path: str | os.PathLike[str] | Mapping[str, Any], splits: Mapping[str, Any] | None = None):
        self.path = EPath("/dict") if isinstance(path, Mapping) else EPath(path)
        self._document: Any = path if isinstance(path, Mapping) else os.fspath(self.path)
        if splits is not None:
            self._document = {
                "__module__": "megatron.energon",
                "__class__": type(self).__name__,
                "splits": dict(splits),
            }

    def specs(
        self, split_part: str, subflavors: Mapping[str, Any] | None = None, missing_ok: bool = False
    ) -> list[LeafSpec]:
        return find_leaves(self._document, split_part, "dataset.yaml", "split.yaml", subflavors, missing_ok)


class Metadataset(MetadatasetV2):
    """Loader of a metadataset of the first version; arguments as for :class:`MetadatasetV2`."""


def load_dataset(path: str | os.PathLike[str] | Mapping[str, Any], **kwargs: Any) -> DatasetLoaderInterface:
    """Return the loader of a data set or a metadataset, from which factories are made.

    Args:
        path: a prepared folder, a JSONL file, a metadataset, or one as a dict.
        kwargs: for a single data set, arguments of :class:`DatasetLoader`.

    Example:
        >>> load_dataset("blend.yaml").get_datasets(training=True, split_part="train", worker_config=config).datasets
    """
    if not is_metadataset(path):
        return DatasetLoader(path=path, **kwargs)  # type: ignore[arg-type]
    if kwargs:
        raise UsageError(f"{', '.join(kwargs)} of a metadataset", fix="write it into its references")
    return MetadatasetV2(path)


def traverse_metadataset(
    path: str | os.PathLike[str], *, split_part: str, **kwargs: Any
) -> list[TraversedDatasetReference]:
    """Return the data sets that a metadataset refers to, including nested ones, without opening them.

    Example:
        >>> [str(one.path) for one in traverse_metadataset("blend.yaml", split_part="train")]
    """
    if not is_metadataset(path):
        raise UsageError("this is not a metadataset", where=os.fspath(path), fix="use load_dataset")
    return load_dataset(path, **kwargs).traverse(split_part=split_part)


def prepare_metadataset(path: str | os.PathLike[str]) -> None:
    """Check all splits of a metadataset. Data that a join needs is made once, when the join is opened.

    Raises:
        ConfigError: the document is invalid.
    """
    splits = load_yaml(os.fspath(path)).entries().get("splits")
    if splits is None:
        raise ConfigError("the metadataset has no splits", file=os.fspath(path), fix="write 'splits:'")
    for name in splits.entries():
        load_dataset(path).traverse(split_part=name)


def get_dataset_from_config(
    path: str | os.PathLike[str],
    *,
    dataset_config: str | None = None,
    split_config: str | None = None,
    split_part: str | None = None,
    training: bool = True,
    sample_type: type | None = None,
    **kwargs: Any,
) -> BaseCoreDatasetFactory:
    """Return the factory that a data set's dataset.yaml names. Arguments as for :meth:`DatasetLoader.get_dataset`.

    Raises:
        UsageError: its samples are not of ``sample_type``.
    """
    loader = DatasetLoader(path=path, dataset_config=dataset_config, split_config=split_config)
    factory = loader.get_dataset(training=training, split_part=split_part or "train", **kwargs)
    kind = factory.__sample_type__
    if sample_type is not None and not (isinstance(kind, type) and issubclass(kind, sample_type)):
        raise UsageError(f"its samples are {kind}, not {sample_type.__name__}", where=os.fspath(path))
    return factory


def _references(spec: LeafSpec) -> list[TraversedDatasetReference]:
    aux = {name: EPath(reference.path) for name, reference in spec.aux.items()}
    epochs = spec.shuffle_over_epochs_multiplier
    return [
        TraversedDatasetReference(EPath(leaf.path), leaf.split_part, dict(aux), dict(leaf.subflavors), epochs)
        for leaf in ((spec,) if spec.join is None else spec.join.members)
    ]


def _factory_of(
    spec: LeafSpec,
    *,
    training: bool,
    worker_config: WorkerConfig,
    epochs: int | None,
    trust_code: bool | None = None,
    filter_name: str | None = None,
    **kwargs: Any,
) -> BaseCoreDatasetFactory:
    if filter_name is not None:
        spec = replace(spec, filters=(*spec.filters, filter_name))
    if epochs is not None and (times := spec.shuffle_over_epochs_multiplier) is not None:
        epochs = -1 if -1 in (epochs, times) else epochs * times
    else:
        epochs = None
    common: dict[str, Any] = {
        **{"split_part": spec.split_part, "split_config": spec.split_config, "subset": spec.subset},
        **{"training": training, "worker_config": worker_config, "shuffle_over_epochs": epochs},
        **kwargs,
    }
    if spec.join is not None or source_opener(spec.path) is not None:
        return LeafFactory(spec, trust_code=trust_code, **common)
    if is_jsonl(spec.path):
        made: BaseCoreDatasetFactory = DefaultCrudeJsonlDatasetFactory(spec.path, subflavors=spec.subflavors, **common)
    else:
        made = factory_of_config(dataset_config_of(spec, trusts(trust_code)), spec, common)
    vars(made)["filters"] = spec.filters  # user factories do not take it as an argument
    return made


def factory_of_config(config: DatasetConfig, spec: LeafSpec, common: dict[str, Any]) -> BaseCoreDatasetFactory:
    """Return the factory for the contents of a dataset.yaml."""
    labels = {**config.subflavors, **spec.subflavors}
    if config.factory is not None:
        made: DatasetFactory = config.factory.at_path(spec.path, **common, **config.arguments)
        made.subflavors = {**(made.subflavors or {}), **labels}
        return made
    if config.kind == "crude":
        return CrudeWebdataset(spec.path, subflavors=labels, part_filter=config.part_filter, **common)
    kind = SAMPLE_TYPES[config.sample_type] if isinstance(config.sample_type, str) else config.sample_type
    return StandardWebdatasetFactory(
        spec.path,
        sample_type=kind,  # type: ignore[arg-type]  # it is a standard one
        subflavors=labels,
        field_map=config.field_map,
        sample_loader=config.sample_loader,
        part_filter=config.part_filter,
        **common,
    )
