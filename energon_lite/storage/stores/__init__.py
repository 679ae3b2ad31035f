"""Stores, which hold files by name (samples are read by number); lazy values; and a cache on a local disk."""

from energon_lite.storage.stores.file_store import FileStoreWrapper
from energon_lite.storage.stores.webdataset_store import JsonlFileStore, WebdatasetFileStore

__all__ = ["FileStoreWrapper", "JsonlFileStore", "WebdatasetFileStore"]
