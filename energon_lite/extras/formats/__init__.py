"""Data sets of other formats than tar: Parquet, Arrow, JSONL, Megatron's ``.bin`` and ``.idx``, MDS, Lance.

Each is a :class:`~energon_lite.storage.read.source.Source`, like a source of the user's; the table ``SOURCES`` of
:mod:`.entry_points` maps paths to formats. ``energon-lite convert`` writes some of them. Packages that a format needs
are imported when a data set of it is opened.
"""
