"""Which micro-batch is next for this rank, and where it is: the data sets, their cursors, and the way through them.

Two kinds, of the same shape: planned ahead (``planned_dataset``, ``planned_iterator``), by a number of samples or by
tokens, which only their plans tell apart; and decided by content, in lanes of chunks (``lane_...``).
"""
