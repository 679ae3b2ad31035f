"""Workers on other machines, by TCP or as Ray actors, and the pool that mixes them with local ones."""

from energon_lite.lazy_exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
