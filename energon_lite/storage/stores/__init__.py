"""Stores, which hold files by name (samples are read by number); lazy values; and a cache on a local disk."""

from energon_lite.lazy_exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
