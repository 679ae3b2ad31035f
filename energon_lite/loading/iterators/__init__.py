"""Data sets, their cursors and the iterators of a rank: which micro-batch comes next, and its position in the run.

There are two kinds of the same structure. Planned batches (``planned_dataset``, ``iterator``) are planned ahead, by
a number of samples or by tokens; only their plans differ. Content-decided batches (``lane_...``) are dealt out in lanes
of chunks.
"""
