"""Stores for a cooker: those that ``aux`` names, and the data set itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon_lite.config.leaf_spec import AuxReference
from energon_lite.errors import ConfigError, EnergonLiteError, UsageError
from energon_lite.extras.media.stores.system_store import ByteRangeStore, SystemFileStore
from energon_lite.extras.media.stores.webdataset_store import JsonlFileStore, WebdatasetFileStore
from energon_lite.storage.index.jsonl import is_jsonl
from energon_lite.storage.read.opened_source import AnySource, OpenedSource
from energon_lite.storage.stores.file_store import FileStore

__all__ = ["open_stores"]

#: Store types of the references that are no data sets.
_KINDS = {"filesystem": SystemFileStore, "byterange": ByteRangeStore}


def open_stores(aux: Mapping[str, AuxReference], primary: AnySource | None, /) -> dict[str, FileStore[Any]]:
    """Open the stores of a leaf; see :class:`~energon_lite.loading.makers.metadataset_keys.StoreGuest`."""
    stores = {name: _opened(name, reference) for name, reference in aux.items()}
    if primary is not None:
        stores["primary"] = _primary(primary)
    return stores


def _opened(name: str, reference: AuxReference) -> FileStore[Any]:
    try:
        return _dataset(reference.path) if reference.kind == "dataset" else _KINDS[reference.kind](reference.path)
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
    return _dataset(source.path)


def _dataset(path: str) -> FileStore[Any]:
    return JsonlFileStore(path) if is_jsonl(path) else WebdatasetFileStore(path)
