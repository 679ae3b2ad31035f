"""From data sets to batches in the training loop: ``loader`` yields them, ``savable_loader`` saves and restores state.

Parts, each of which may use those after it: ``saved_states`` and ``measuring``; ``iterators``, which find the next
micro-batch; ``executors``, which run jobs; ``makers``, which make batches from addresses.
"""

from energon_lite.imports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
