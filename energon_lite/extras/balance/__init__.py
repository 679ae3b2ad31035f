"""Even work for the ranks of a step: cost models, balanced steps, columns of images, shared encoders, measured runs."""

from energon_lite.lazy_exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
