"""Data sets of other formats than tar: Parquet, Arrow, Megatron's ``.bin`` and ``.idx``, MDS, Lance.

Each is a :class:`~energon_lite.storage.read.source.Source`, registered by
:func:`~energon_lite.storage.read.source.register_source` like a source of the user's. :mod:`.registry` maps paths to
formats. Packages that a format needs are imported when a data set of it is opened.
"""
