"""Which micro-batch is next for this rank, and where it is: the data sets, their cursors, and the way through them.

Three kinds, of the same shape: planned (``dataset``, ``cursor``, ``planned_walk``), planned by tokens (``token_...``),
and decided by content, in lanes of chunks (``chunked_dataset``, ``lane_...``).
"""
