"""From data sets to batches in the training loop: ``loader`` yields them, ``savable_loader`` saves and restores state.

Subpackages, each of which may use those after it: ``states`` and ``measuring``; ``iterators``, which find the next
micro-batch; ``executors``, which run jobs; ``makers``, which make batches from addresses.
"""
