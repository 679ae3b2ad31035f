"""Data sets of other formats than tar: Parquet, Arrow, Megatron's ``.bin`` and ``.idx``, MDS, Lance.

Each is a :class:`~energon_lite.storage.read.source.Source`, and comes in by
:func:`~energon_lite.storage.read.source.register_source`, as one of a user's does. :mod:`.registry` says which paths
mean which. Packages that a format needs are imported when a data set of it is opened.
"""
