"""Keys of metadatasets that guests handle: ``join``, joined data sets; ``aux``, the stores of files for a cooker;
``filter``, conditions on samples; and ``weight_unit``, weights that are shares of another unit than samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

from energon_lite.config.leaf_spec import AuxReference, LeafSpec
from energon_lite.config.metadataset_document import Reference
from energon_lite.documents import Node
from energon_lite.entry_points import metadataset_guest
from energon_lite.errors import ConfigError, UsageError
from energon_lite.hooks import Cooker, TaskEncoder, check_stores
from energon_lite.storage.read.opened_source import AnySource
from energon_lite.storage.read.sample_choice import SampleFilter
from energon_lite.storage.samples.sample_loader import Loader
from energon_lite.storage.stores.file_store import DecodeFileStore, FileStore

__all__ = [
    "JoinGuest",
    "StoreGuest",
    "WeightGuest",
    "filters_of",
    "join_guest",
    "stores_of",
    "weight_guest",
]


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
    guest: JoinGuest = metadataset_guest("join", spec.origin)
    return guest


def weight_guest(origin: str) -> WeightGuest:
    """Return the guest for weights in another unit; ``origin`` is the place of the blend, for messages.

    Raises:
        ConfigError: its extra is not installed.
    """
    guest: WeightGuest = metadataset_guest("weight_unit", origin)
    return guest


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
                f"and give {type(encoder).__name__} a cooker for it",
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
