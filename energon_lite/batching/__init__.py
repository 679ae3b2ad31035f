"""Strategies and plans, which decide by integers alone which samples share a batch, and collation into a batch."""

from energon_lite.imports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
