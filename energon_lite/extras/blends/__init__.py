"""Blends of very many data sets, with a cache of their properties, weights that are shares of tokens, and rebases."""

from energon_lite.lazy_exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
