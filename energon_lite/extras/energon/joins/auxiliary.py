"""Stores that a data set's cooker is given: those that ``aux`` names, and the data set itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon_lite.config.leaf_spec import AuxReference, LeafSpec
from energon_lite.errors import ConfigError, EnergonLiteError, UsageError
from energon_lite.extras.media.stores.system_store import ByteRangeStore, SystemFileStore
from energon_lite.extras.media.stores.webdataset_store import JsonlFileStore, WebdatasetFileStore
from energon_lite.hooks import Cooker, TaskEncoder, check_stores
from energon_lite.storage.index.jsonl import is_jsonl
from energon_lite.storage.read.opened_source import AnySource, OpenedSource
from energon_lite.storage.stores.file_store import DecodeFileStore, FileStore

__all__ = ["stores_of"]

#: Store types of the references that are no data sets.
_KINDS = {"filesystem": SystemFileStore, "byterange": ByteRangeStore}


def stores_of(
    spec: LeafSpec, source: AnySource, cooker: Cooker | None, encoder: TaskEncoder
) -> Mapping[str, FileStore[Any]]:
    """Return the stores for the cooker of a leaf, by name, with the encoder's decoder.

    Raises:
        ConfigError: a store cannot be opened; or stores are given, but the leaf has no cooker to use them.
        UsageError: the cooker does not accept them, or the leaf's own samples cannot be looked up by name.
    """
    if cooker is None:
        if spec.aux:
            reference = next(iter(spec.aux.values()))
            raise ConfigError(
                f"aux is for cookers: the data set {spec.path} has none",
                file=reference.origin,
                fix="remove aux; or make the data set a crude one (__class__: CrudeWebdataset in its dataset.yaml), "
                f"and give {type(encoder).__name__} a cooker for it",
            )
        return {}
    check_stores(cooker, spec.aux, encoder, spec.path)
    stores = {name: _opened(name, reference) for name, reference in spec.aux.items()}
    if cooker.need_primary and "primary" not in stores:
        stores["primary"] = _primary(source)
    if encoder.decoder is None:
        return stores
    return {name: DecodeFileStore(store, decoder=encoder.decoder) for name, store in stores.items()}


def _opened(name: str, reference: AuxReference) -> FileStore[Any]:
    try:
        if reference.kind != "dataset":
            return _KINDS[reference.kind](reference.path)
        return JsonlFileStore(reference.path) if is_jsonl(reference.path) else WebdatasetFileStore(reference.path)
    except EnergonLiteError as error:
        raise ConfigError(
            f"aux {name!r} cannot be opened: {error.what} ({error.where})", file=reference.origin, fix=error.fix
        ) from error


def _primary(source: AnySource) -> FileStore[Any]:
    if isinstance(source, OpenedSource):
        raise UsageError(
            "a cooker with need_primary=True is for a source of your own, whose samples are found by number only",
            where=source.path,
            fix="leave out need_primary; or name a store of the same data under aux",
        )
    return JsonlFileStore(source.path) if is_jsonl(source.path) else WebdatasetFileStore(source.path)
