"""Where the bytes of samples are.

Its rooms, each of which uses those before it: files, tar, index, read, samples, prepare.
"""

from energon_lite.lazy_exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
