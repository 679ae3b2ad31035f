"""Keys of metadatasets that guests handle: ``join``, joined data sets; ``aux``, the stores of files for a cooker;
``filter``, conditions on samples; ``weight_unit``, weights that are shares of another unit than samples; ``weight``,
weights that change. And blends: their open leaves, and their numbers to show."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from energon_lite.config.leaf_spec import AuxReference, LeafSpec
from energon_lite.config.metadataset_document import Reference, ScheduleReader
from energon_lite.documents import Node
from energon_lite.entry_points import metadataset_guest
from energon_lite.errors import ConfigError, UsageError
from energon_lite.hooks import Cooker, TaskEncoder, check_stores
from energon_lite.loading.iterators.dataset import Identity, LeafIdentity
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.order.orders import ChangingWeights
from energon_lite.storage.read.opened_source import AnySource
from energon_lite.storage.read.source import SampleFilter
from energon_lite.storage.samples.field_map import Loader
from energon_lite.storage.stores import DecodeFileStore, FileStore


class JoinGuest(NamedTuple):
    """Guest that opens joined data sets: entry ``join`` of the table ``METADATASET_KEYS``.

    Attributes:
        read: reads a reference; see :class:`~energon_lite.config.metadataset_document.JoinReader`.
        source: opens the data sets of a leaf, as the source of the joined samples.
        loader: ``(leaf, its source, encoder, trust_code)``: makes the loader of its samples.
    """

    read: Callable[[Node, Collection[str]], Reference]
    source: Callable[[LeafSpec], AnySource]
    loader: Callable[[LeafSpec, AnySource, TaskEncoder, bool], Loader]


class StoreGuest(Protocol):
    """Guest that opens stores: entry ``aux`` of the table ``METADATASET_KEYS``."""

    def __call__(self, aux: Mapping[str, AuxReference], primary: AnySource | None, /) -> dict[str, FileStore[Any]]:
        """Return the stores by name.

        Args:
            aux: the data sets and folders.
            primary: source of a data set that becomes the store ``primary``; None: there is no such store.

        Raises:
            ConfigError: a store cannot be opened.
            UsageError: the samples of ``primary`` cannot be looked up by name.
        """


class WeightGuest(NamedTuple):
    """Guest that converts weights: entry ``weight_unit`` of the table ``METADATASET_KEYS``.

    Attributes:
        by_samples: ``(leaves, their sources)``: converts the weights of a blend to shares of samples.
        mean: ``(leaf, its source, unit)``: exact mean of the unit over the samples of a leaf.
    """

    by_samples: Callable[[Sequence[LeafSpec], Sequence[AnySource]], list[LeafSpec]]
    mean: Callable[[LeafSpec, AnySource, str], Fraction]


def join_guest(spec: LeafSpec) -> JoinGuest:
    """Return the guest for a leaf of joined data sets.

    Raises:
        ConfigError: its extra is not installed.
    """
    return metadataset_guest("join", spec.origin)


def weight_guest(origin: str) -> WeightGuest:
    """Return the guest for weights in another unit; ``origin`` is the place of the blend, for messages.

    Raises:
        ConfigError: its extra is not installed.
    """
    return metadataset_guest("weight_unit", origin)


def filters_of(spec: LeafSpec) -> list[SampleFilter]:
    """Return the conditions on the samples of a leaf. Entry ``filter`` of the table ``METADATASET_KEYS`` is a function
    of a text.

    Raises:
        ConfigError: the extra is not installed.
        UsageError: a text is no condition.
    """
    if not spec.filters:
        return []
    make: Callable[[str], SampleFilter] = metadataset_guest("filter", spec.origin)
    try:
        return [make(text) for text in spec.filters]
    except UsageError as error:
        raise UsageError(error.what, where=spec.origin or spec.path, fix=error.fix) from None


def stores_of(
    spec: LeafSpec, source: AnySource, cooker: Cooker | None, encoder: TaskEncoder
) -> Mapping[str, FileStore[Any]]:
    """Return the stores for the cooker of a leaf, by name, with the encoder's decoder.

    Raises:
        ConfigError: a store cannot be opened, or the extra is not installed; or stores are given, but the leaf has no
            cooker to use them.
        UsageError: the cooker does not accept them, or the leaf's own samples cannot be looked up by name.
    """
    origin = next((reference.origin for reference in spec.aux.values()), spec.path)
    if cooker is None:
        if spec.aux:
            raise ConfigError(
                f"aux is for cookers: the data set {spec.path} has none",
                file=origin,
                fix="remove aux; or make the data set a crude one (__class__: CrudeWebdataset in its dataset.yaml), "
                f"and give the task encoder, here a {type(encoder).__name__}, a cooker for it",
            )
        return {}
    check_stores(cooker, spec.aux, encoder, spec.path)
    primary = source if cooker.need_primary and "primary" not in spec.aux else None
    if not spec.aux and primary is None:
        return {}
    guest: StoreGuest = metadataset_guest("aux", origin)
    stores = guest(spec.aux, primary)
    if encoder.decoder is None:
        return stores
    return {name: DecodeFileStore(store, decoder=encoder.decoder) for name, store in stores.items()}


class StageShare(NamedTuple):
    """Share of a leaf in one stage of the run: from the position ``start`` on, with its value there, and at the end."""

    start: int
    first: float
    last: float


class BlendSchedule(ChangingWeights, Protocol):
    """Weights of a blend that change during the run, in stages."""

    @property
    def count(self) -> int:
        """Number of stages."""

    def identity(self, settings: Mapping[str, Any], leaves: Sequence[LeafIdentity]) -> Identity:
        """Return the identity of the run; the leaves' weights are those at the start."""

    def samples(self, position: int) -> list[float]:
        """Return the number of samples of each leaf before a position, as a fraction."""

    def shares(self) -> list[tuple[StageShare, ...]]:
        """Return the shares of each leaf, by stage."""


class ScheduleGuest(ScheduleReader, Protocol):
    """Guest of weights that change: entry ``weight`` of the table ``METADATASET_KEYS``."""

    def stages(self, specs: Sequence[LeafSpec]) -> BlendSchedule:
        """Return the weights of a blend; those of at least one leaf change."""


def find_schedule(specs: Sequence[LeafSpec]) -> BlendSchedule | None:
    """Return the weights of a blend if they change during the run, else None."""
    changing = next((spec for spec in specs if spec.schedule is not None), None)
    if changing is None:
        return None
    guest: ScheduleGuest = metadataset_guest("weight", changing.origin)
    schedule = guest.stages(specs)
    return schedule if schedule.count > 1 else None


@dataclass(frozen=True)
class LeafFacts:
    """Numbers of one leaf of a blend.

    Args:
        spec: the leaf as the documents describe it.
        samples: number of samples.
        share: share of the blend, 0 to 1; if it changes, the mean over the run.
        epochs: number of times that the run shows each sample; 0 if the length of the run is not known.
        stages: share in each stage, if shares change.
        measured: share in the unit of the blend's weights, 0 to 1, if that is not samples.
        unit: the unit.
    """

    spec: LeafSpec
    samples: int
    share: float
    epochs: float
    stages: tuple[StageShare, ...] = ()
    measured: float | None = None
    unit: str = "samples"


def leaf_facts(specs: Sequence[LeafSpec], samples: Sequence[int], blend_samples: int = 0) -> list[LeafFacts]:
    """Return the numbers of the leaves of a blend.

    Args:
        specs: the leaves.
        samples: number of samples of each leaf.
        blend_samples: length of the run in samples of the blend, for the number of epochs; 0: not known.
    """
    schedule = find_schedule(specs)
    ends: list[tuple[StageShare, ...]] = [()] * len(specs)
    if schedule is not None:
        parts, ends = schedule.samples(blend_samples), schedule.shares()
        total = float(max(blend_samples, 1))
    else:
        pairs = zip(specs, samples, strict=True)
        parts = [
            leaf_spec.weight if leaf_spec.repetitions is None else leaf_spec.repetitions * count
            for leaf_spec, count in pairs
        ]
        total = sum(parts)
    return [
        LeafFacts(spec, count, part / total, blend_samples * part / total / count, shares)
        for spec, count, part, shares in zip(specs, samples, parts, ends, strict=True)
    ]


def by_samples(specs: Sequence[LeafSpec], sources: Sequence[AnySource]) -> list[LeafSpec]:
    """Return the leaves of a blend with weights that are shares of samples, converted by a guest if they are not.

    Args:
        specs: the leaves as the documents describe them.
        sources: the source of each leaf.

    Raises:
        DataIndexError: a data set has no column of that unit.
        ConfigError: the samples of a leaf have a total of zero; or the extra is not installed.
    """
    unit = next((spec.units[0] for spec in specs if spec.units), None)
    return list(specs) if unit is None else weight_guest(unit.origin).by_samples(specs, sources)


#: Function that returns the settings of a leaf for its identity, by its number.
Settings = Callable[[int], tuple[Any, ...]]


@dataclass(frozen=True)
class OpenedBlend:
    """Leaves of a blend, and the properties that its order depends on.

    Args:
        leaves: the leaves, ready for reading.
        lengths, keys: ``[leaves]`` int64 and uint64, of each leaf.
        multipliers: ``shuffle_over_epochs_multiplier`` of each leaf.
        repetitions: repetitions of each leaf; empty in a blend by weight.
        weights: share of each leaf at the start of the run.
        schedule: the shares during the run, if they change.
        identities: returns the identity of each leaf, given their settings.
    """

    leaves: Sequence[Leaf]
    lengths: NDArray[np.int64]
    keys: NDArray[np.uint64]
    multipliers: Sequence[int | None]
    repetitions: tuple[float, ...]
    weights: tuple[float, ...]
    schedule: BlendSchedule | None
    identities: Callable[[Settings], Sequence[LeafIdentity]]


def blend_of_leaves(
    specs: Sequence[LeafSpec], leaves: Sequence[Leaf], identities: Sequence[LeafIdentity]
) -> OpenedBlend:
    """Return the blend of open leaves.

    Raises:
        ConfigError, DataIndexError: as :func:`by_samples`.
    """
    specs = by_samples(specs, [leaf.source for leaf in leaves])
    return OpenedBlend(
        leaves,
        np.array([leaf.length for leaf in leaves], dtype=np.int64),
        np.array([leaf.key for leaf in leaves], dtype=np.uint64),
        [spec.shuffle_over_epochs_multiplier for spec in specs],
        tuple(spec.repetitions for spec in specs if spec.repetitions is not None),  # set for all leaves or none
        tuple(spec.weight for spec in specs),
        find_schedule(specs),
        lambda settings: tuple(
            replace(identity, settings=settings(number)) for number, identity in enumerate(identities)
        ),
    )
