"""Storage: reading the bytes of samples, and the indexes of their places.

Its folders, each of which uses those before it: files, tar, index, read, samples, prepare.
"""

from energon_lite.lazy_exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
