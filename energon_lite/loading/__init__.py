"""From data sets to batches in the training loop: ``loader`` hands them out, ``savable_loader`` saves where it is.

Its rooms, each of which may use those after it: ``states`` and ``measuring``; ``iterators``, which micro-batch is next;
``executors``, who does the jobs; ``makers``, from addresses to batches.
"""

from energon_lite.lazy_exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
