"""Object stores: data sets behind URLs, ranges read ahead, caches on local disks, and preparation there."""

from energon_lite.lazy_exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
